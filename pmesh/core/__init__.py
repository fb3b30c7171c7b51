"""Pure decisions and protocols: no I/O, no clock, no randomness, no log.

In the order in which data passes through them:

identity    keys, certificates (the mesh's authority), advertisement (what mDNS carries)
links       addresses (which to dial first), dialing (when), health (what a silence means)
wire        framing (lengths, first bytes), link (messages between agents), local (messages between
            trainer and agent), records (sealed lane records)
values      views, rosters, trainers, verdicts: the values that agents agree on
views       state (what one member knows), agreement (the effects of a message), leader (the
            leader's half), rosters (jobs in a view change), outcomes (which ops completed, failed
            or run again), op_log (what a rank reports of its ops), quorum (which side may
            continue), ring (its order), limits (against dishonest members)
jobs        rank (its fences, failures and results), progress (how far all are), attempt (does for
            one op what the view has decided), jobs (who waits, who lives here), call_count (a
            program's calls stay in step with those of other ranks)
ops         kinds, plan (sends and receives), reducing, reduce_scatter, moving, coded (who makes
            plans), cost (which is the fastest), reductions (the arithmetic)
p2p         messages between two ranks, each exactly once

There are two shapes: byte protocols are objects that take bytes and return events; decisions are
frozen states and functions, with time and entropy as arguments. V1, O1, I1 and so on are the rules
of docs/explanation/rules.md.
"""
