"""What the edges between a job's ranks cost, as far as all of them know it, and what follows."""

from pmesh.core.costs import Edges, Islands, Strategy, choose, islands_of


class RingCosts:
    """The table that all ranks of a roster share; before they have one, they use the ring."""

    def __init__(self) -> None:
        self.edges: Edges | None = None

    def choose(self, nbytes: int) -> Strategy:
        """How to all-reduce so many bytes: the same on every rank."""
        return "ring" if self.edges is None else choose(self.edges, nbytes)

    @property
    def islands(self) -> Islands:
        """Ranks with fast edges between them; without any, each rank is one."""
        return islands_of(self.edges) if self.edges is not None else ()
