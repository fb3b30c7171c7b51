"""`pmesh plot`: an hour of the numbers of each job: its speed, and what its ranks report."""
