"""Kills, cuts, stops and starves real agents and trainers, and measures how the others go on.

In the order in which a measurement passes through them:

    pattern    what trainers add up, so that every result can be checked exactly
    trainer    the training script: an elastic loop that reports each op as a line
    digits     the other one: it learns handwritten digits, for the rows about a training run
    warm       starts agents and trainers in 20 ms, by forking what has been imported already
    cluster    hosts on a virtual network, with an agent and a trainer each
    oplog      what the trainers have reported: recovery times, torn ops, wrong sums
    faults     one class for each way to lose somebody
    episodes   fault after fault in one cluster, each at a random moment in the middle of an op
    campaigns  what is no episode: churn, partitions, a newcomer with 500 MB, cold starts
    bits       flipped bits in everything that crosses the network
    results    what was measured, as JSON
    bars       what it is measured against
    report     both, as docs/explanation/reliability.md

Linux, root: see `tools/virtual_lan.py`.
"""
