"""Launches: what to do while a command runs on several machines at once.

`starting` decides on the machine that has started it, `part` on each machine that runs ranks of it,
`engines` computes the environment of each rank, and `lines` writes their output.
"""
