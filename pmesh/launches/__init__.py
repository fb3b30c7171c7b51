"""`pmesh run`: one command on several machines, from its start to one exit code."""
