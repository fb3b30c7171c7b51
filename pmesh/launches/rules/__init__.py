"""What to do while a command runs on several machines at once.

`starting` decides on the machine that has started it, `part` on each machine that runs ranks of it,
`restarts` when a command is started again. `engines` computes the environment of each rank, `lines`
writes their output, and `pulling` decides which files a machine fetches.
"""
