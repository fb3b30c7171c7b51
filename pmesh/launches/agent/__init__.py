"""A command that one agent has the others run (`pmesh run --on`).

`permission` says who may, `checks` whether a machine can, `here` runs the ranks of this machine,
`started` follows a launch that was started here, `router` has all of them and speaks on the
links, and `sessions` serves local programs.
"""
