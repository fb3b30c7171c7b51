"""Kills, cuts, stops and starves real agents and trainers, and measures how the others go on.

In the order in which a measurement passes through them:

    calls      what trainers call: every result can be checked exactly
    ranks      what they call where machines have several trainers each
    trainer    the training scripts, which report each op as a line
    episodes   the ways to lose somebody; fault after fault, each in the middle of an op
    campaigns  what is no episode: churn, partitions, a newcomer with 500 MB, cold starts
    cables     hosts with two cables each, of which one is pulled, goes dead or comes back
    steady     what must disturb nobody
    bits       flipped bits in everything that crosses the network
    bars       what it is measured against
    report     both, as docs/explanation/reliability.md

The hosts with their agents and trainers are those of `tools.lab.cluster`; `tools.lab.oplog` judges
what the trainers have reported.

Linux, root: see `tools/lab/net.py`.
"""
