"""A real agent that is admitted to the view, and beside each heartbeat tells its peers a lie.

`PATCH` runs in it first; every tenth lie is a line that the campaign counts.
"""

import os
from collections.abc import Callable, Iterator
from random import Random
from typing import Final, TypeAlias

from msgspec.structs import replace

from pmesh.agent.mesh.links import Link
from pmesh.core.identity.keys import NodeKey
from pmesh.core.identity.names import sign_name
from pmesh.core.links.delivery import Packet
from pmesh.core.values import Roster, Seat, SignedName, Trainer, View
from pmesh.core.wire.views import (
    AskToJoin,
    Commit,
    Heartbeat,
    Propose,
    Refuse,
    Superseded,
    TellView,
    Veto,
)
from pmesh.ids import MAX_COUNTER, Epoch, Incarnation, Member
from simulation.wire import AnyMessage, AnyPathMessage, decode_untrusted

SEED_VARIABLE: Final = "HOSTILE_SEED"
PATCH: Final = f"""
import os
if "{SEED_VARIABLE}" in os.environ:
    from tools.hostile.liar import lie
    lie(int(os.environ["{SEED_VARIABLE}"]))
"""
EVERY: Final = 10
HIGHEST: Final = (2**32 - 1, 2**40, MAX_COUNTER)
STEPS: Final = (1, 1, 1, 1, 2, 1000, 2**20)

Twist: TypeAlias = Callable[[View, Member], View]
TWISTS: Final[dict[str, Twist]] = {
    "its leader has no seat": lambda view, _: replace(
        view, seats=tuple(s for s in view.seats if s.member.node != view.epoch.leader)
    ),
    "each seat, job and rank stands twice": lambda view, _: replace(
        view, seats=view.seats * 2, rosters=_with_ranks(view, lambda ranks: ranks * 2) * 2
    ),
    "jobs without ranks": lambda view, _: replace(view, rosters=_with_ranks(view, lambda _: ())),
    "jobs, but no seats": lambda view, _: replace(view, seats=()),
    "300 seats": lambda view, _: replace(
        view, seats=view.seats + tuple(_stranger(view.epoch) for _ in range(298))
    ),
    "ranks of a machine without a seat": lambda view, _: replace(
        view,
        rosters=_with_ranks(view, lambda ranks: tuple(map(_elsewhere, ranks))),
    ),
    "names have changed places": lambda view, _: replace(
        view,
        seats=tuple(
            replace(seat, said=view.seats[i - 1].said) for i, seat in enumerate(view.seats)
        ),
    ),
    # Well-formed, and false: nobody is left but the leader and the one who reads it.
    "you are alone": lambda view, you: replace(
        view,
        seats=tuple(s for s in view.seats if s.member.node in {you.node, view.epoch.leader}),
        rosters=_with_ranks(view, lambda ranks: tuple(r for r in ranks if r.member == you)),
    ),
}


def _nobody() -> tuple[Member, SignedName]:
    """Return a machine that does not exist, and has yet signed its name."""
    key = NodeKey.from_seed(os.urandom(32))
    member = Member(key.node, Incarnation(1))
    return member, sign_name(key, member, "mac")


def _stranger(admitted: Epoch) -> Seat:
    return Seat(*_nobody(), admitted, None)


def _elsewhere(rank: Trainer) -> Trainer:
    member, said = _nobody()
    return replace(rank, member=member, said=said)


def _with_ranks(
    view: View, change: Callable[[tuple[Trainer, ...]], tuple[Trainer, ...]]
) -> tuple[Roster, ...]:
    return tuple(
        replace(r, number=view.epoch.counter, trainers=change(r.trainers)) for r in view.rosters
    )


class Liar:
    """What it has seen, from which it makes its lies."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._me: Member | None = None
        self._view: View | None = None
        self._counter = 1
        self._beats = random.randrange(30)
        """For so many heartbeats it is honest: so it comes into the view, and may come to lead."""
        self.told = 0
        """How many views."""

    def see(self, message: AnyPathMessage) -> None:
        """Take note of what it or another has said in earnest."""
        match message:
            case Commit(view=view) | TellView(view=view) | Superseded(view=view):
                if self._view is None or view.epoch > self._view.epoch:
                    self._view = view
                self._counter = max(self._counter, view.epoch.counter)
            case Heartbeat(view=view, promised=promised):
                self._counter = max(self._counter, view.counter, promised.counter)
            case _:
                pass

    def lies(self, beat: Heartbeat, you: Member) -> Iterator[AnyMessage]:
        """What to say now: some of it in order, so that it is believed."""
        # An agent's first heartbeat is of the view that it has alone, which it leads.
        me = self._me = self._me or Member(beat.view.leader, beat.view.incarnation)
        self._beats -= 1
        if self._view is None or self._beats > 0:
            return
        random = self._random
        counter = min(MAX_COUNTER, self._counter + random.choice(STEPS))
        epoch = Epoch(counter, me.node, me.incarnation)
        highest = Epoch(random.choice(HIGHEST), me.node, me.incarnation)
        view = random.choice(list(TWISTS.values()))(replace(self._view, epoch=epoch), you)
        self.told += 1
        match random.randrange(12):
            case 0:
                yield random.choice((replace(beat, view=highest), replace(beat, promised=highest)))
            case 1:
                yield TellView(view)
            case 2:
                yield Superseded(view)
            case 3:
                yield Refuse(self._view.epoch, highest)
                yield Veto(self._view.epoch)
            case 4:
                yield AskToJoin(epoch, whole=random.random() < 0.5)  # noqa: PLR2004 - a coin
            case _:
                members = tuple(sorted({me, you, *self._view.members}))
                jobs = tuple(roster.job for roster in self._view.rosters)
                yield Propose(epoch, self._view, members, members, jobs)
                yield Commit(view, self._costs(len(view.seats)))

    def _costs(self, size: int) -> tuple[tuple[int, ...], ...]:
        wrong = self._random.choice((0, 1, size - 1, size + 1, size, size))
        return tuple((self._random.choice((1, -1, 2**63 - 1)),) * wrong for _ in range(size))


def lie(seed: int) -> None:
    """From now on, on all links of this process."""
    liar = Liar(Random(seed))  # noqa: S311 - repeats a run
    send, receive = Link.send, Link.receive_untrusted

    def lying_send(link: Link, message: AnyMessage) -> None:
        liar.see(message)
        send(link, message)
        before = liar.told
        if isinstance(message, Heartbeat) and link.messages_received:  # the peer has taken it on
            for said in liar.lies(message, link.peer.member):
                send(link, said)
            if liar.told // EVERY > before // EVERY:
                print("lied", liar.told, flush=True)

    def lying_receive(link: Link, packet: Packet) -> bool:
        liar.see(decode_untrusted(packet.message))
        return receive(link, packet)

    setattr(Link, "send", lying_send)  # noqa: B010 - a type checker would not have it
    setattr(Link, "receive_untrusted", lying_receive)  # noqa: B010
