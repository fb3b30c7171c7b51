"""What a member shows that says it has gone on without some members of its view."""

from random import Random

from msgspec.structs import replace

from pmesh.core.values import View
from pmesh.core.wire.views import Heartbeat, TellView
from pmesh.ids import Epoch, Member

STEPS = (1, 2, 1000)
BEGINS, ENDS = 0.02, 0.1  # of the heartbeats


def later_view(view: View, me: Member, dice: Random) -> View:
    """A view of the same lineage, with me and some of the others; any of them leads it."""
    kept = [seat for seat in view.seats if seat.member == me or dice.random() < 0.5]  # noqa: PLR2004
    epoch = Epoch(view.epoch.counter + dice.choice(STEPS), *dice.choice(kept).member)
    return View(epoch, tuple(replace(seat, previous=view.epoch) for seat in kept))


class LaterViews:
    """Shows such a view now and then, for as long as the dice say."""

    def __init__(self, dice: Random) -> None:
        self._dice = dice
        self._shown: View | None = None

    def instead_of(
        self, beat: Heartbeat, view: View, me: Member
    ) -> tuple[TellView, Heartbeat] | None:
        """What to send in the place of this heartbeat; None: the heartbeat."""
        if self._shown is None:
            if me in view.members and self._dice.random() < BEGINS:
                self._shown = later_view(view, me, self._dice)
        elif self._dice.random() < ENDS:
            self._shown = None
        if self._shown is None:
            return None
        epoch = self._shown.epoch
        return TellView(self._shown), replace(beat, view=epoch, promised=epoch)
