"""Pure decisions and protocols: no I/O, no clock, no randomness, no log.

In the order in which data passes through them:

identity    keys, certificates (the mesh's authority), advertisement (what mDNS carries), names
            (signed, so that no machine takes another's), removals (who has no place any more),
            rotations (which mesh key follows another), refused_keys (how often an event says who
            came with another key)
links       addresses (which to dial first), dialing (when), health (what a silence means), paths
            (which path of a link is used), bandwidth (what a path carries), reasons (why a path is
            used, for users), delivery (each message once and in order, over any path), relaying
            (what a third machine forwards), clocks (what another machine's clock shows)
wire        framing (lengths, first bytes), channels (who receives which message between agents),
            stream (bytes with a window, in parts of messages), link, probes, views, lanes and
            relays (the messages of each), calls (what an op is called with), session (between a
            program and its agent), trainer and control (the messages of each kind of session), aead
            (the cipher of lanes), records (sealed by it), preamble (the first bytes of a lane),
            subflows (one lane over several connections)
values      views, rosters, trainers, verdicts: the values that agents agree on
topology    graph (the machines, and what was measured of each edge), ring (the best order), ranks
            (which of them are near to each other)
views       state (what one member knows), agreement (the effects of a message), leader (the
            leader's half), rosters (jobs in a view change), room (what fits into a view), outcomes
            (which ops completed, failed or run again), op_log (what a rank reports of its ops),
            quorum (which side may continue), limits (against dishonest members), bound (how soon
            healed agents agree)
jobs        rank (its fences, failures and results), progress (how far all are), attempt (does for
            one op what the view has decided), jobs (who waits, who lives here), call_count (a
            program's calls stay in step with those of other ranks), speed (how fast a job trains),
            op_times (how long its ops took),
            reports (the numbers that trainers report of a step),
            comparing (whether all ranks have the same weights),
            shares (how many rows of a batch each rank takes), batches (the same, for data loaders
            that are ahead of the training)
ops         kinds, plan (sends and receives), shard (which values a rank owns), reducing,
            reduce_scatter, moving, coded (who makes plans), cost (which is the fastest), reductions
            (the arithmetic), together (ranks that are all at one agent), machines (several ranks
            at some agents), moments (means and variances of several ranks as one)

There are two shapes: byte protocols are objects that take bytes and return events; decisions are
frozen states and functions, with time and entropy as arguments. V1, O1, I1 and so on are the rules
of docs/explanation/rules.md.
"""
