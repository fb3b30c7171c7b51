"""Agreement on the members: views, rosters, quorum."""
