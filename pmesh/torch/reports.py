"""What a program with `torch.distributed` reports of its step: `mesh.report` without a mesh."""

from pmesh.torch.library import dist
from pmesh.torch.process_group import pmesh_group
from pmesh.torch.ranks import WORLDS


def report(**values: float) -> None:
    """Show numbers of this step, such as `loss=loss.item()`, as `mesh.report` does.

    They travel with the next call of the default process group, or of the mesh of an elastic
    program. In a program that has neither, or a group of another backend, this does nothing.

    Args:
        values: as for `mesh.report`: numbers by name, and no tensors.

    Raises:
        UsageError: as for `mesh.report`.
    """
    if WORLDS.elastic is not None:
        WORLDS.elastic.mesh.report(**values)
    elif dist.is_initialized() and "pmesh" in dist.get_backend():
        pmesh_group(None, "report").report(values)
