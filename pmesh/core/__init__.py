"""Pure decisions and protocols: no I/O, no clock, no dice, no log.

In the order in which things pass through them:

who is who      identity (node key, mesh key), certificates (the mesh's authority)
finding         advertisement (what mDNS carries), addresses (whom to try first), dialling (when)
at the door     first_bytes (link, lane or garbage), greeting (the first message of any version)
on a link       framing (lengths), messages (what is said), validation (what no honest member would
                say), health (who is here)
views           views (the values), standing (what one member knows), agreement (what follows from
                a message), proposals (the leader's half), rosters (jobs in a view change),
                op_outcomes (their ops), quorum (which side may go on), topology (the order
                of the ring)
ops             session (what a trainer asks), ledger (what a rank knows of its ops), schedule (who
                sends what when, along the ring), plans and plans_* (likewise, between any ranks),
                costs (which of them is the fastest), reductions (adding up), records (sealing it)

Two shapes: byte protocols are objects that take bytes and give events; decisions are frozen states
and functions, to which time and entropy are arguments.
"""
