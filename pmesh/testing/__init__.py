"""For users' tests: `SimulatedMesh` runs a training script in threads, without an agent."""

from pmesh.testing.simulated_mesh import SimulatedMesh

__all__ = ["SimulatedMesh"]
