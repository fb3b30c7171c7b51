"""In which order the ranks of a job are counted."""

from dataclasses import dataclass

from pmesh.core.wire.local import World
from pmesh.ids import TrainerId


@dataclass(frozen=True, slots=True)
class Order:
    """In which order the ranks of a job are counted: the ring's own, or a group's."""

    trainers: tuple[TrainerId, ...] | None = None
    """Of a group; None: as in the ring."""

    def seen(self, world: World) -> World:
        """The world with its ranks in this order."""
        if self.trainers is None or not set(world.trainers) <= set(self.trainers):
            return world
        places = sorted(range(len(world.trainers)), key=lambda i: self._place(world.trainers[i]))
        rank = places.index(world.rank) if world.rank >= 0 else -1
        names = tuple(world.names[i] for i in places)
        return World(rank, tuple(world.trainers[i] for i in places), names)

    def places(self, world: World) -> tuple[int, ...]:
        """For each rank in this order its place in the ring."""
        return tuple(world.trainers.index(trainer) for trainer in self.seen(world).trainers)

    def _place(self, trainer: TrainerId) -> int:
        return (self.trainers or ()).index(trainer)
