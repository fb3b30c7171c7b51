"""Fakes that users may test with too: a mesh of threads, a seeded network, a virtual cluster.

`SimulatedMesh` runs a training script in threads, without an agent.

`network` is a network of numbered hosts that delays, loses, repeats, cuts and closes; `cluster`
puts simulated agents on it, which drive the real agreement of `pmesh.core` on simulated time;
`faults` lets things go wrong; `invariants` watches. `python -m pmesh.testing.simulate 1000` runs
a thousand histories; the same seed gives the same history.
"""

from pmesh.testing.simulated_mesh import SimulatedMesh

__all__ = ["SimulatedMesh"]
