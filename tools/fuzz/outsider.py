"""A member outside of all views: it links with the agents, and sends them anything at full pace.

    $ PMESH_KEY=... python -m tools.fuzz.outsider '{"peers": [["127.0.0.1", 7777]], "seed": 7}'

Who is refused comes back under another node key, which a holder of the mesh key can make at will.
Each of its lives has a name, perhaps another machine's, does a few of the `ACTIONS`, and leaves.
One that gets the mesh key, though nobody may give it that, ends the program: that is a finding.
What it needs for lanes, it opens, and holds until it leaves: what stays then, is a finding.
"""

import contextlib
import math
import os
import resource
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path as File
from random import Random
from typing import Any

import msgspec
import trio
from msgspec.structs import replace

from pmesh.agent.mesh.keyring import latest_key
from pmesh.core.identity.certificates import issue_credentials
from pmesh.core.identity.keys import MeshKey, NodeKey, mesh_key_from_text
from pmesh.core.links.delivery import PREFIX_BYTES
from pmesh.core.wire.framing import read_hello_untrusted
from pmesh.core.wire.lanes import OfferLane, Splice
from pmesh.core.wire.link import (
    MAX_HELLO_BYTES,
    Address,
    Hello,
    KnownPeers,
    Leaving,
)
from pmesh.core.wire.preamble import Preamble, encode_preamble
from pmesh.core.wire.relays import Relay
from pmesh.core.wire.stream import PART_BYTES
from pmesh.errors import ProtocolError
from pmesh.ids import Incarnation, JobName, Member, NodeId, TrainerId, path_name
from pmesh.launches.wire.messages import (
    BeginRanks,
    Command,
    LaunchPart,
    LaunchTerms,
    PrepareLaunch,
    RankGroup,
    Variable,
)
from pmesh.net.lanes.opening import dial_lane
from pmesh.net.links.path import Path, shake_hands
from pmesh.net.links.tls import TlsContexts
from pmesh.store.wire import StorePart
from simulation.wire import decode_untrusted, encode_unbounded
from tools.fuzz.agent import ROOM, accepts, new_liar
from tools.fuzz.corpus import MessageRecorder
from tools.fuzz.doors import ask_for_key, greet, knock, new_guest
from tools.fuzz.large import fill
from tools.fuzz.liar import Liar
from tools.fuzz.life import GONE, LiarsLife, hello_of
from tools.fuzz.signed import remove, rotate

LIVES_AT_ONCE = 3
MOST_ACTIONS = 6  # of one life
ATTEMPTS = 20
BEAT_S = 0.2
LONGEST_LIFE_S = 30.0
PAUSE_S = 0.5  # after a life that nobody let begin
MANY_LANES, MANY_SPLICES, MANY_MESSAGES = 300, 40, 1000
NAMES = ("liar", "mac-1", "honest-1", "[/bold] mac", "[link=http://x]y", "mac-1 (abcd)", "x" * 64)
FORBIDDEN = ("LD_PRELOAD", "PYTHONHOME", "PMESH_HOME", "BASH_ENV")


class OutsiderOrder(msgspec.Struct, frozen=True, kw_only=True):
    peers: tuple[Address, ...]
    """The doors of the agents."""
    seed: int
    log: str = ""
    """The file into which the lies go, each time once."""
    home: str = ""
    """Of an agent that has the mesh key, also when that changes; "": it stays that of PMESH_KEY."""
    actions: tuple[str, ...] = ()
    """Of `ACTIONS`, what it does only; all of them if there are none."""


def largest_hello(dice: Random) -> Hello:
    """One that can't be a few bytes larger, if some attempts come to that."""
    largest = small = hello_of(NodeKey.from_seed(dice.randbytes(32)), "liar")
    for _ in range(ATTEMPTS):
        largest = max(largest, fill(small, dice, _accepts_hello, room=MAX_HELLO_BYTES), key=_size)
        if _size(largest) > MAX_HELLO_BYTES - PREFIX_BYTES:
            break
    return largest


def _accepts_hello(hello: Hello) -> bool:
    try:
        read_hello_untrusted(msgspec.msgpack.encode(hello), proven=hello.member.node)
    except ProtocolError:
        return False
    return True


def _size(message: object) -> int:
    return len(msgspec.msgpack.encode(message))


async def lie(life: LiarsLife) -> None:
    """Changed and invented messages of all kinds, large ones and thousands of one."""
    for _ in range(life.dice.choice((1, 10, 30))):
        said = life.liar.anything()
        for message in {id(message): message for message in said}.values():
            life.tell(message)
        await life.send(said)


async def name_many(life: LiarsLife) -> None:
    """Itself with as much as it may say, and machines that do not exist with as much."""
    nobody = replace(life.largest, member=Member(NodeId(life.some(32)), Incarnation(1)))
    for hello in (life.largest, nobody, replace(life.largest, addresses=life.doors)):
        named = KnownPeers((hello,))
        if _size(named) <= ROOM and accepts(named):
            await life.send([named] * 10)


async def offer_lanes(life: LiarsLife) -> None:
    """Lanes of a job that does not exist: opened, and never used."""
    several, dial = life.dice.random() < 0.5, life.dice.random() < 0.2  # noqa: PLR2004
    for _ in range(MANY_LANES):
        offer = OfferLane(
            lane=life.some(),
            job=JobName("nobody's"),
            born=life.epoch,
            number=1 + life.dice.randrange(1000),
            sender=TrainerId(life.dice.randrange(1000)),
            receiver=TrainerId(life.dice.randrange(1000)),
            key=life.some(32),
            return_key=life.some(32),
            op=life.dice.choice((-1, -2, 0, 5)),
            dial=dial,
            several=several,
        )
        await life.send([offer])
        for index in range(0 if dial else 1 + 2 * several):
            await _open_lane(life, offer, index)


async def _open_lane(life: LiarsLife, offer: OfferLane, index: int) -> None:
    with contextlib.suppress(*GONE), trio.move_on_after(1):
        stream = await life.knock()
        life.held.append((await dial_lane(stream, offer, peer="it", index=index)).close)


async def splice(life: LiarsLife) -> None:
    """Connections that one agent continues to another, held open."""
    for _ in range(MANY_SPLICES):
        ticket, far = life.some(), life.dice.choice(life.others)
        await life.send([Splice(ticket, far, dial=life.dice.random() < 0.2)])  # noqa: PLR2004
        with contextlib.suppress(*GONE), trio.move_on_after(1):
            stream = await life.knock()
            life.held.append(stream.socket.close)
            await stream.send_all(encode_preamble(Preamble(ticket)))


async def relay(life: LiarsLife) -> None:
    """Relayed connections that nobody reads."""
    for number in range(16):
        far = life.dice.choice(life.others).node
        await life.send([Relay(far, number, to_forward=True, data=life.some(8192))] * 8)


async def write_to_stores(life: LiarsLife) -> None:
    """Parts of stores of jobs and rosters that nobody knows, and of such as it has heard of."""
    for number in range(MANY_MESSAGES):
        job = JobName(life.dice.choice(("honest", "shared", f"nobody's {number}")))
        data = bytes(life.dice.choice((0, 8, PART_BYTES)))
        await life.send([StorePart(job, life.dice.getrandbits(61), 0, 0, data)])


async def launch(life: LiarsLife) -> None:
    """Commands with variables that nobody may set; output of launches that nobody has begun."""
    for _ in range(20):
        number = path_name(f"{life.dice.getrandbits(48):012x}")
        nodes = tuple(member.node for member in life.others)
        command = Command(
            (sys.executable, "-c", "pass"), "~/", (Variable(life.dice.choice(FORBIDDEN), "/x"),)
        )
        asks = PrepareLaunch(number, JobName("x"), command, LaunchTerms(), 0, nodes, (), 1)
        await life.send([asks, BeginRanks(number, 0, 0, (RankGroup(1),))])
        part = LaunchPart(number, 0, 0, bytes(PART_BYTES), to_starter=True)
        await life.send([part] * 10)


ACTIONS: dict[str, Callable[[LiarsLife], Awaitable[None]]] = {
    action.__name__: action
    for action in (
        *(lie, name_many, offer_lanes, splice, relay, write_to_stores, launch),
        *(greet, knock, ask_for_key, remove, rotate),
    )
}


@dataclass(frozen=True, kw_only=True)
class OutsiderAttack:
    """What all lives have in common."""

    doors: tuple[Address, ...]
    """Of the agents."""
    mesh_key: Callable[[], MeshKey]
    """Returns that of the mesh, which changes."""
    liar: Liar
    guest: Liar = field(default_factory=new_guest)
    had: list[MeshKey] = field(default_factory=list[MeshKey])
    """All mesh keys that there were, the latest last."""
    actions: tuple[str, ...] = tuple(ACTIONS)
    lives: float = math.inf
    """How many."""
    tell: Callable[[Any], None] = lambda _: None
    """Called with each lie before it is sent."""

    async def run(self) -> None:
        """Live again and again, a few at a time, until cancelled or all lives are over."""
        large, left = largest_hello(self.liar.dice), self.lives

        async def go_on() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                began = trio.current_time()
                with trio.move_on_after(LONGEST_LIFE_S):
                    await _live(self, large)
                if trio.current_time() < began + PAUSE_S:
                    await trio.sleep(PAUSE_S)

        async with trio.open_nursery() as nursery:
            for _ in range(LIVES_AT_ONCE):
                nursery.start_soon(go_on)


async def _live(attack: OutsiderAttack, large: Hello) -> None:
    dice = attack.liar.dice
    key = NodeKey.from_seed(dice.randbytes(32))
    largest = replace(
        hello_of(key, large.name), addresses=large.addresses, interfaces=large.interfaces
    )
    hello = hello_of(key, dice.choice(NAMES))
    if name_many.__name__ in attack.actions and dice.random() < 0.5:  # noqa: PLR2004
        hello = largest
    if (mesh_key := attack.mesh_key()) not in attack.had:
        attack.had.append(mesh_key)
    life = LiarsLife(
        dice=dice,
        key=key,
        liar=attack.liar,
        guest=attack.guest,
        mesh_keys=attack.had,
        hello=hello,
        largest=largest,
        doors=attack.doors,
        tell=attack.tell,
    )
    actions = [ACTIONS[name] for name in attack.actions]
    contexts = TlsContexts.of(issue_credentials(mesh_key, key))
    async with trio.open_nursery() as nursery:
        try:
            with contextlib.suppress(*GONE):
                await _link_with_all(life, contexts, nursery)
                life.liar.hear(life.beat)
                nursery.start_soon(_beat, life)
                await trio.sleep(3 * BEAT_S * dice.random())
                for action in dice.choices(actions, k=dice.randrange(1, MOST_ACTIONS)):
                    await action(life)
                await life.send([Leaving()] * (dice.random() < 0.5))  # noqa: PLR2004
        finally:
            life.let_go()
            nursery.cancel_scope.cancel()


async def _link_with_all(life: LiarsLife, contexts: TlsContexts, nursery: trio.Nursery) -> None:
    for door in life.doors:
        stream = await trio.open_tcp_stream(door.host, door.port)
        link = await shake_hands(
            stream, contexts=contexts, server_side=False, hello=lambda _: life.hello
        )
        life.links.append(link)
        nursery.start_soon(_write, link)
        nursery.start_soon(_listen, link, life.liar, nursery.cancel_scope)


async def _write(link: Path) -> None:
    with contextlib.suppress(*GONE):  # `let_go` closes it meanwhile
        await link.run_writer()


async def _listen(link: Path, liar: Liar, life: trio.CancelScope) -> None:
    """Learn from what it is told; when one agent has refused it, that life is over."""
    with contextlib.suppress(*GONE):
        while True:
            liar.hear(decode_untrusted((await link.receive()).message))
    life.cancel()


async def _beat(life: LiarsLife) -> None:
    while True:
        await life.send([life.beat])
        await trio.sleep(BEAT_S)


async def _main(order: OutsiderOrder) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
    key = mesh_key_from_text(os.environ["PMESH_KEY"])

    def follow() -> MeshKey:
        nonlocal key
        key = latest_key(File(order.home), key) if order.home else key
        return key

    attack = OutsiderAttack(
        doors=order.peers,
        mesh_key=follow,
        liar=new_liar(order.seed),
        guest=new_guest(order.seed),
        actions=order.actions or tuple(ACTIONS),
        tell=MessageRecorder(File(order.log), encode_unbounded) if order.log else lambda _: None,
    )
    await attack.run()


if __name__ == "__main__":
    trio.run(_main, msgspec.json.decode(sys.argv[1], type=OutsiderOrder))
