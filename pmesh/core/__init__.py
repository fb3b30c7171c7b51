"""Pure decisions and protocols: no I/O, no clock, no dice, no log.

In the order in which things pass through them:

identity    keys, certificates (the mesh's authority), advertisement (what mDNS carries)
links       addresses (which to try first), dialing (when), health (what a silence means)
wire        framing (lengths, first bytes), link (messages between agents), local (messages between
            trainer and agent), records (sealed lane records)
values      views, rosters, trainers, verdicts: the values that agents agree on
views       state (what one member knows), agreement (what follows from a message), leader (the
            leader half), rosters (jobs through a view change), outcomes (their ops), quorum (which
            side may go on), ring (its order), stall_guard (after a stall), validation and limits
            (what no honest member would send)
jobs        op_log (what a rank knows of its ops)
ops         kinds, plan and schedule (who sends what when), all_reduce, reduce, moving, coded (the
            plans), cost (which is the fastest), reductions (adding up)
p2p         messages between two ranks, each exactly once
budgets     shares of what is scarce

Two shapes: byte protocols are objects that take bytes and give events; decisions are frozen states
and functions, to which time and entropy are arguments.
"""
