"""This rank's share of each batch: measured in its steps, and agreed on in `sync`."""

from collections.abc import Mapping

from pmesh.compression.blocks import Indices
from pmesh.core.jobs.shares import WHOLE, Pace, Standing, choose_weights, deal_rows
from pmesh.core.wire.trainer import World
from pmesh.ids import TrainerId

_UNSYNCED = Standing(weight=WHOLE)


class Shares:
    """The weights of all ranks, and the time that this one computes for a row.

    A step is the time from the end of one sync to the beginning of the next one. A step in which
    this rank takes no rows by `deal` is not measured.
    """

    def __init__(self, wish: Standing | None = None) -> None:
        """`wish` has this rank's `most_rows` and `even`; None: no limit, and measured shares."""
        self._wish = Standing() if wish is None else wish
        self._pace = Pace()
        self._agreed: Mapping[TrainerId, Standing] = {}
        self._rows = 0
        self._began_s: float | None = None
        self._deals = False

    def begin_step(self, own_s: float) -> None:
        """Begin to measure. `own_s` is how long this rank has computed in its session so far."""
        self._rows, self._began_s = 0, own_s

    def end_step(self, own_s: float) -> None:
        """Measure the step, which had the same session at its beginning."""
        if self._rows and self._began_s is not None:
            self._pace.note(own_s - self._began_s, self._rows)
        self._rows, self._began_s = 0, None

    def standing(self, world: World) -> Standing:
        """Return what this rank tells the others."""
        weight = 0
        if world.rank >= 0 and (mine := self._agreed.get(world.trainers[world.rank])) is not None:
            weight = mine.weight
        return self._wish._replace(
            ns_per_row=self._pace.ns_per_row,
            uncertainty_ppm=self._pace.uncertainty_ppm,
            weight=weight,
        )

    def agree(self, standings: Mapping[TrainerId, Standing]) -> None:
        """Take the weights that follow from what all ranks have told."""
        weights = choose_weights(tuple(standings.values()))
        if weights != tuple(each.weight for each in standings.values()):
            self._pace.forget()
        self._agreed = {
            trainer: each._replace(weight=weight)
            for (trainer, each), weight in zip(standings.items(), weights, strict=True)
        }

    def deal(self, rows: int, world: World) -> Indices:
        """Return this rank's rows of a batch. Raises UsageError if the ranks can't take so many."""
        known = self._known(world)
        weights, most = [each.weight for each in known], [each.most_rows for each in known]
        dealt = deal_rows(rows, weights, most)[world.rank]
        self._rows += len(dealt)
        self._deals = True
        return dealt

    def percent(self, world: World) -> int:
        """Return this rank's share of a batch in percent; -1 if it takes no rows by `deal`."""
        if not self._deals or world.rank < 0:
            return -1
        weights = [each.weight for each in self._known(world)]
        return round(100 * weights[world.rank] / sum(weights))

    def _known(self, world: World) -> list[Standing]:
        """Return what each rank has told; before the first sync all are alike."""
        return [self._agreed.get(trainer, _UNSYNCED) for trainer in world.trainers]
