"""Messages between simulated ranks: what `pmesh.client.mail_session` and the agents do for real."""

import time

from pmesh.client.mail_session import Arrived
from pmesh.core.messages import Letter
from pmesh.core.reductions import Values
from pmesh.errors import MeshClosed, OpTimedOut, PmeshError, RankLost
from pmesh.ids import TrainerId
from pmesh.testing.simulated_hub import Hub, Transit


class SimulatedMail:
    """One rank's sends and receives; see `LetterSession`."""

    def __init__(self, hub: Hub, me: TrainerId) -> None:
        self._hub = hub
        self._me = me
        self._calls: dict[int, Transit] = {}
        self._begun = 0
        self._closed = ""

    @property
    def has_ended(self) -> bool:
        """Whether further calls are in vain."""
        return bool(self._closed)

    def begin_send(self, to: TrainerId, letter: Letter, data: Values, timeout_s: float) -> int:
        """Leave a copy of an array's bytes for another rank; returns the call's number."""
        deadline = time.monotonic() + timeout_s
        return self._begin(Transit((to,), letter.tag, deadline, letter, data.copy()))

    def begin_receive(self, sources: tuple[TrainerId, ...], tag: int, timeout_s: float) -> int:
        """Ask for a letter of one of these; returns the call's number."""
        return self._begin(Transit(sources, tag, time.monotonic() + timeout_s))

    def done(self, call: int) -> bool:
        """Whether a call has ended, well or badly."""
        with self._hub.changed:
            return call not in self._calls or self._look(self._calls[call])

    def end(self, call: int, timeout_s: float | None) -> Arrived | None:
        """Wait for a call; what it has received, if it is a receive.

        Raises:
            TimeoutError: it is still under way.
            OpTimedOut: nobody met it in its time.
            RankLost: those whom it could have met are gone.
        """
        transit = self._calls[call]
        until = transit.deadline
        if timeout_s is not None:
            until = min(until, time.monotonic() + timeout_s)
        with self._hub.changed:
            while not self._look(transit):
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"a message was not through within {timeout_s:g} s")
                self._hub.changed.wait(left_s)
            del self._calls[call]
        if transit.failed is not None:
            raise transit.failed
        return None if transit.letter is not None else transit.met

    def close(self, reason: str) -> None:
        """End it; whoever waits gets MeshClosed, with this reason."""
        with self._hub.changed:
            self._closed = self._closed or reason
            for transit in self._calls.values():
                self._fail(transit, MeshClosed(f"this mesh has ended: {self._closed}"))
            self._hub.changed.notify_all()

    # --- inside, with the hub's lock held

    def _begin(self, transit: Transit) -> int:
        with self._hub.changed:
            call, self._begun = self._begun, self._begun + 1
            self._calls[call] = transit
            self._hub.transits.append((self._me, transit))
            self._meet(transit)
            self._hub.changed.notify_all()
        return call

    def _meet(self, mine: Transit) -> None:
        """The first of the other kind that fits: those of a pair and tag keep their order."""
        for owner, theirs in self._hub.transits:
            fits = owner in mine.wanted and self._me in theirs.wanted and mine.tag == theirs.tag
            if fits and (mine.letter is None) != (theirs.letter is None):
                source, sent = (owner, theirs) if mine.letter is None else (self._me, mine)
                assert sent.letter is not None  # noqa: S101 - one of the two is a send
                assert sent.data is not None  # noqa: S101 - likewise
                mine.met = theirs.met = Arrived(source, sent.letter, sent.data)
                self._hub.transits.remove((owner, theirs))
                self._hub.transits.remove((self._me, mine))
                return

    def _look(self, transit: Transit) -> bool:
        if not transit.is_over and time.monotonic() >= transit.deadline:
            self._fail(transit, OpTimedOut("nobody took, or sent, a message in time"))
        if not transit.is_over and not {*transit.wanted} & {*self._hub.ranks}:
            lost = ", ".join(f"rank {rank}" for rank in transit.wanted)
            self._fail(transit, RankLost(f"{lost} is lost: {self._hub.lost}"))
        return transit.is_over

    def _fail(self, transit: Transit, error: PmeshError) -> None:
        transit.failed = error
        if (self._me, transit) in self._hub.transits:
            self._hub.transits.remove((self._me, transit))
