"""Attacks real agents while they train, beside controls, and measures what the training notices.

    packets    what a stranger says by mDNS: invented machines, junk, copies and replays
    attackers  the programs of the attacker's host
    turns      an attack of so many seconds beside its control: ops/s, descriptors, memory, joining
    rows       the table's rows, each with its bar

All traffic stays within network namespaces that a lab makes. Linux, root: `tools/lab/net.py`.
"""
