"""`pmesh top`: the mesh in a terminal, as it lives.

`history` keeps what a status does not say: how the loss of each job has gone. `screen` makes lines
of a status, that history and the last events, and is pure. `command` reads the status, shows the
lines, and reads the keys.
"""
