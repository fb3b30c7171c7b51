"""`pmesh invite` on a member, `pmesh join` on the machine that is to become one."""
