"""`pmesh members`, `remove` and `key rotate`: who has a place in the mesh, and by which key."""
