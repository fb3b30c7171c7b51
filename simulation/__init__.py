"""A whole cluster in one process, on simulated time: real decisions, and all that can go wrong.

`network` is a network of numbered hosts that delays, loses, repeats, cuts and closes; `cluster`
puts simulated agents on it, which drive the real agreement of `pmesh.core`; `faults` lets things go
wrong; `invariants` watches. `python -m simulation.seeds 1000` runs a thousand histories; the same
seed gives the same history.
"""
