"""An agent whose identity is known beforehand, so that messages to it can be sent once more.

And the hostile member: such an agent whose links carry what a liar makes of its messages.

    $ PMESH_HOME=... python -m tools.fuzz.agent '{"number": 3, "seed": 7, "log": "lies"}' up ...
"""

import gc
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import msgspec
import trio
from msgspec.structs import replace

from pmesh.agent.home import load_node_key, open_home
from pmesh.agent.mesh import bans, links
from pmesh.agent.mesh.links import Link
from pmesh.cli import main
from pmesh.core.links.delivery import PREFIX_BYTES, Packet, pack
from pmesh.core.values import View
from pmesh.core.wire.channels import MAX_MESSAGE_BYTES, Message
from pmesh.core.wire.probes import PATHS
from pmesh.core.wire.stream import PART_BYTES
from pmesh.core.wire.views import Commit, Heartbeat, TellView
from pmesh.errors import ProtocolError
from pmesh.ids import Member, NodeId, node_text
from pmesh.launches.wire.messages import (
    LaunchPart,
    LaunchPrepared,
    PrepareLaunch,
)
from simulation.wire import AnyMessage, AnyPathMessage, decode_untrusted, encode_unbounded
from tools.fuzz.claims import choose_claims
from tools.fuzz.corpus import MessageRecorder, load
from tools.fuzz.later_views import LaterViews
from tools.fuzz.liar import Liar
from tools.fuzz.store_lies import lie_about_stores, new_store_liar

SHORT_BAN_S = 1.0  # who is banned can't lie; bans have tests of their own
REPLAYED_AT_ONCE = 3  # with each heartbeat: many at once would all go to a link that ends

ROOM = MAX_MESSAGE_BYTES - PREFIX_BYTES

LONG_STEP = "a step of the event loop took"
LONGEST_STEP_S = 0.2  # of processor time, so that other programs have no part in it


class LongSteps(trio.abc.Instrument):
    """Tells of steps of the event loop that are too long, and how much of them was a collection."""

    def __init__(self) -> None:
        self._began_s = self._collection_began_s = self._collected_s = 0.0
        self._garbage = 0
        gc.callbacks.append(self._collect)

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collection_began_s = time.thread_time()
        else:
            self._collected_s += time.thread_time() - self._collection_began_s
            self._garbage += info["collected"]

    def before_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002 - trio's
        """Trio runs a task until its next await."""
        self._began_s, self._collected_s, self._garbage = time.thread_time(), 0.0, 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        took_s = time.thread_time() - self._began_s
        if took_s > LONGEST_STEP_S:
            garbage = f"{self._collected_s:.3f} s for {self._garbage} objects of garbage"
            print(f"{LONG_STEP} {took_s:.3f} s, {garbage}: {task}", file=sys.stderr, flush=True)


CLAIMS = 0.02  # of the heartbeats
BANNED = "banned "  # and the node id
LIES_OF_OUTPUT = 4000  # messages of 32 KiB, that many with each heartbeat:
OUTPUT_AT_ONCE = 32

Send = Callable[[Link, Any], None]


class AgentOrder(msgspec.Struct, frozen=True):
    number: int
    """Gives it its node key and its incarnation."""
    seed: int = -1
    """Of its lies; -1: it is honest."""
    log: str = ""
    """The file into which its lies go."""
    begin: str = ""
    """It is honest until this file exists."""
    replay: str = ""
    """A case, whose messages it sends first."""


def receive_untrusted(message: Message) -> AnyPathMessage:
    """What its receiver does first, without the checks of an honest sender."""
    return decode_untrusted(encode_unbounded(message))


def accepts(message: Message) -> bool:
    """Whether a receiver takes the message."""
    try:
        receive_untrusted(message)
    except ProtocolError:
        return False
    return True


KINDS = get_args(AnyPathMessage)


def new_liar(seed: int) -> Liar:
    """One that speaks to other members."""
    return Liar(seed, KINDS, receive_untrusted, room=ROOM)


def _send_lie(send: Send, link: Link, lie: Message) -> None:
    """Send it as the link does, or over the path in use if it is a message of that."""
    data = _encode_lie(lie)
    if data[:1] != bytes((PATHS.number,)):
        send(link, lie)
    elif link.current is not None:
        link.current.path.send_packet(pack(0, 0, data))


def insist_on_claims(liar: Liar, beat: Heartbeat, view: View, me: Member) -> None:
    """Let it say of itself as much as anybody takes."""
    taken = choose_claims(view, me, liar.dice, lambda found: accepts(replace(beat, **found)))
    liar.insist(taken)


def _our_end(link: Link) -> Member | None:
    return next((live.path.ours.member for live in link.paths.values()), None)


def lying(
    send: Send, liar: Liar, *, on: Callable[[Link], bool], tell: Callable[[Any], None]
) -> Send:
    """`Link.send`, but on these links the liar has its say; from the others it learns.

    Args:
        send: The honest one.
        liar: It speaks up with each heartbeat, too.
        on: Whether the link is the liar's.
        tell: Called with each lie before it is sent.
    """
    views: list[View] = []
    later = LaterViews(liar.dice)

    def lie(link: Link, message: AnyMessage) -> None:
        if isinstance(message, Commit | TellView):
            views[:] = [message.view]
        if not on(link):
            liar.hear(message)
            send(link, message)
            return
        me = _our_end(link)
        if isinstance(message, Heartbeat) and views and me is not None:
            if liar.dice.random() < CLAIMS:
                insist_on_claims(liar, message, views[0], me)
            if shown := later.instead_of(message, views[0], me):
                for said in shown:
                    tell(said)
                    send(link, said)
                return
        for said in (*liar.say(message), *(isinstance(message, Heartbeat) * liar.interrupt())):
            if said is message:
                send(link, message)
            else:
                tell(said)
                _send_lie(send, link, said)

    return lie


class Replayed(Message, frozen=True):
    """The bytes of a message, which are sent as they are."""

    data: bytes


def _encode_lie(message: Message) -> bytes:
    return message.data if isinstance(message, Replayed) else encode_unbounded(message)


def _replaying(send: Send, order: AgentOrder) -> Send:
    # As they were, also if they can't be decoded.
    left = [Replayed(message) for message in load(Path(order.replay)).messages]

    def replay(link: Link, message: AnyMessage) -> None:
        if isinstance(message, Heartbeat) and Path(order.begin).exists():
            for said in left[:REPLAYED_AT_ONCE]:
                _send_lie(send, link, said)
            del left[:REPLAYED_AT_ONCE]
        send(link, message)

    return replay


def _listening(receive: Callable[[Link, Packet], bool], liar: Liar) -> Callable[..., bool]:
    outputs: dict[Link, Iterator[AnyMessage]] = {}

    def listen(link: Link, packet: Packet) -> bool:
        message = decode_untrusted(packet.message)
        liar.hear(message)
        is_new = receive(link, packet)
        match message:
            case PrepareLaunch() as asked:
                outputs[link] = output_of(asked)
                return False  # what the honest agent would answer is not said
            case Heartbeat():
                for said in islice(outputs.get(link, ()), OUTPUT_AT_ONCE):
                    link.send(said)
            case _:
                pass
        return is_new

    return listen


def tell_bans() -> None:
    """From now on each ban is a line, also if it is a short one."""
    add = bans.Bans.add

    def tell(self: bans.Bans, node: NodeId, *, now: float) -> None:
        print(f"{BANNED}{node_text(node)}", file=sys.stderr, flush=True)
        add(self, node, now=now)

    setattr(bans.Bans, "add", tell)  # noqa: B010 - a type checker would not have it


def output_of(asked: PrepareLaunch) -> Iterator[AnyMessage]:
    """It refuses to run the command, and has output all the same."""
    yield LaunchPrepared(asked.launch, "no")
    for number in range(LIES_OF_OUTPUT):
        data = bytes(PART_BYTES)
        yield LaunchPart(asked.launch, number * PART_BYTES, 0, data, to_starter=True)


def _be(order: AgentOrder) -> None:
    home = open_home(Path(os.environ["PMESH_HOME"]))
    load_node_key(home, entropy=order.number.to_bytes(32, "big"))
    bans.BANNED_S = bans.LONGEST_BANNED_S = SHORT_BAN_S
    secrets.randbits = lambda k: order.number % 2**k  # the agent's incarnation is drawn so
    tell_bans()
    trio.run = partial(trio.run, instruments=[LongSteps()])  # type: ignore[assignment]
    setattr(links, "encode", _encode_lie)  # noqa: B010 - a lie may be too large
    if order.replay:
        Link.send = _replaying(Link.send, order)  # type: ignore[method-assign, assignment]
    if order.seed >= 0:
        liar, tell, begin = (
            new_liar(order.seed),
            MessageRecorder(Path(order.log), encode_unbounded),
            Path(order.begin),
        )
        Link.send = lying(Link.send, liar, on=lambda _: begin.exists(), tell=tell)  # type: ignore[method-assign, assignment]
        Link.receive_untrusted = _listening(Link.receive_untrusted, liar)  # type: ignore[method-assign]
        lie_about_stores(new_store_liar(order.seed), begin.exists)


if __name__ == "__main__":
    _be(msgspec.json.decode(sys.argv.pop(1), type=AgentOrder))
    main()
