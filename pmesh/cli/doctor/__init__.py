"""`pmesh doctor`: finds what keeps machines apart, or slow.

`rules` judges facts, and is pure. `looks` collects the facts that the commands need: those of this
machine by itself, those of the network by `nearby`, those that the system's tools print by `tools`.
`command` prints what was found.
"""
