"""`SimulatedMesh` runs a training script in threads, for the tests of users."""

from pmesh.testing.simulated_mesh import SimulatedMesh

__all__ = ["SimulatedMesh"]
