"""Agreement on who is there: views, rosters, quorum."""
