"""Facts in, findings out: each check has a dataclass of facts and a function that judges them.

findings    what a check has found, and the order in which checks are made
here        this machine: its home, its keys, its port, its agent
network     what keeps machines apart
slow        what makes them slow, or lets them fall asleep
outputs     what the tools of the system print
nftables    what `nft` prints
"""
