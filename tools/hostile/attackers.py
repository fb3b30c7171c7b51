"""The programs of the attacker's host; each waits for a line when it is ready, and ends by itself.

python -m tools.hostile.attackers ORDER     ORDER is an `AttackOrder` as JSON
"""

import contextlib
import os
import resource
import secrets
import socket
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Literal, TypeAlias

import msgspec
import trio

from pmesh.core.identity.certificates import issue_credentials
from pmesh.core.identity.keys import AdvertisementKey, MeshKey, NodeKey, mesh_key_from_text
from pmesh.core.identity.names import sign_name
from pmesh.core.values import SignedName
from pmesh.core.wire.link import PROTOCOL_VERSION, Address, Hello, KnownPeers, Leaving
from pmesh.core.wire.views import Heartbeat
from pmesh.ids import Epoch, Incarnation, Member, NodeId
from pmesh.net.links.path import Path as Link
from pmesh.net.links.path import shake_hands
from pmesh.net.links.tls import TlsContexts
from tools.fuzz import outsider
from tools.fuzz.agent import AgentOrder, new_liar
from tools.fuzz.doors import new_guest
from tools.fuzz.honest import SHARED
from tools.fuzz.life import hello_of
from tools.hostile.packets import BLACK_HOLES, GROUP, announce, invent, mutate, name_only, question

PORT_OF_NOBODY = 9  # discard: neither an agent nor zeroconf listens there
WITHDRAWN_AFTER = 20  # packets
MOST_PACKETS = 12_000  # made before the attack begins, then repeated
NAMED_AT_ONCE = 64  # as many of one message as an agent reads
AT_ONCE = 1000  # connections
LISTEN_S = 1.5
BEAT_S = 0.2
HUGE_FRAME = struct.pack("!I", 2**32 - 1)
# What a TLS client begins with, and never goes on: a record of 16 KiB with a ClientHello in it.
HALF_A_CLIENT_HELLO = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + bytes(8 * 1024)
GARBAGE = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    HUGE_FRAME + bytes(64),
    HALF_A_CLIENT_HELLO,
    b"PMLN\x01" + bytes(16),
    b"\x17" + bytes(4095),
)


Mix: TypeAlias = Literal["all", "invented", "junk", "member"]


class AttackOrder(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    """A function of this module that has no underscore."""
    seconds: float
    count: int
    """Packets, names or connections, evenly over these seconds."""
    control: bool = False
    """The same to a port of nobody, or by somebody who does no harm."""
    peers: tuple[Address, ...] = ()
    """The doors of the mesh's agents."""
    path: str = ""
    """The Unix socket of one of them, on its own host."""
    seed: int = 1
    mix: Mix = "all"


def mdns(order: AttackOrder) -> None:
    """Announce and withdraw machines, or send junk, altered copies and replays: see `Mix`."""
    random = Random(order.seed)  # noqa: S311 - repeats a run
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sender.bind(("", GROUP[1]))
        real = _listen(sender)
        packets = list(_packets(order, random, real))
        group = (GROUP[0], PORT_OF_NOBODY) if order.control else GROUP
        _begin(real=len(real), packets=len(packets))
        for number in _paced(order):
            sender.sendto(packets[number % len(packets)], group)


def _packets(order: AttackOrder, random: Random, real: list[bytes]) -> Iterator[bytes]:
    ours = AdvertisementKey.of(mesh_key_from_text(os.environ["PMESH_KEY"]))
    made_up = AdvertisementKey(ours.tag, random.randbytes(32))  # the tag can be heard
    other_mesh = AdvertisementKey(random.randbytes(8), random.randbytes(32))
    keys = {"member": ours, "other mesh": other_mesh}
    to_withdraw: deque[bytes] = deque()
    kinds = {
        "all": ["invented"] * 8 + ["staying", "names", "replay", "mutated", "other mesh"],
        "invented": ["invented"],
        "member": ["member"],
        "junk": ["mutated", "mutated", "mutated", "garbage"],
    }[order.mix]
    for _ in range(min(order.count, MOST_PACKETS)):
        kind = random.choice(kinds)
        if len(to_withdraw) > WITHDRAWN_AFTER:
            yield to_withdraw.popleft()
            continue
        machine = invent(random, keys.get(kind, made_up))
        match kind:
            case "names":
                yield name_only(random)
            case "replay" | "mutated" if real:
                packet = random.choice([*real, announce(machine)])
                yield packet if kind == "replay" else mutate(packet, random)
            case "garbage":
                yield random.randbytes(random.randrange(1, 1400))
            case _:
                yield announce(machine)
                if kind in {"invented", "member"}:
                    to_withdraw.append(announce(machine, withdrawn=True))


def _listen(receiver: socket.socket) -> list[bytes]:
    """What the agents of the network announce when they are asked."""
    membership = socket.inet_aton(GROUP[0]) + socket.inet_aton("0.0.0.0")  # noqa: S104 - any interface
    receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
    receiver.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 0)
    receiver.settimeout(LISTEN_S / 3)
    heard: dict[bytes, None] = {}
    until = time.monotonic() + LISTEN_S
    receiver.sendto(question(), GROUP)
    while time.monotonic() < until:
        with contextlib.suppress(TimeoutError):
            packet = receiver.recv(9000)
            if packet[2:3] == b"\x84":
                heard[packet] = None
    receiver.setsockopt(socket.IPPROTO_IP, socket.IP_DROP_MEMBERSHIP, membership)
    return list(heard)


def member(order: AttackOrder) -> None:
    """Link with all as a holder of the mesh key, name machines that don't exist, and leave."""
    trio.run(_be_member, order)


async def _be_member(order: AttackOrder) -> None:
    key = NodeKey.from_seed(secrets.token_bytes(32))
    mesh_key = mesh_key_from_text(os.environ["PMESH_KEY"])
    contexts = TlsContexts.of(issue_credentials(mesh_key, key))
    me = Member(key.node, Incarnation(1))
    hello = Hello(PROTOCOL_VERSION, me, sign_name(key, me, "liar"))
    async with trio.open_nursery() as nursery:
        links: list[Link] = []
        for peer in order.peers:
            stream = await trio.open_tcp_stream(peer.host, peer.port)
            links.append(
                await shake_hands(
                    stream, contexts=contexts, server_side=False, hello=lambda _: hello
                )
            )
            nursery.start_soon(_serve, links[-1])
        nursery.start_soon(_beat, links, key.node)
        await trio.to_thread.run_sync(_begin)
        began = trio.current_time()
        messages = order.count // NAMED_AT_ONCE
        for number in range(messages):
            await trio.sleep_until(began + order.seconds * number / messages)
            if not order.control:
                named = KnownPeers(tuple(_nobody() for _ in range(NAMED_AT_ONCE)))
                for link in links:
                    link.send(named)
        await trio.sleep_until(began + order.seconds)
        for link in links:
            link.send(Leaving())
            await link.aclose()
        nursery.cancel_scope.cancel()


async def _serve(link: Link) -> None:
    """Read all and keep nothing, until an agent ends the link."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run_writer)
        # EndOfChannel, ClosedResourceError or pmesh's own: in any case there is no link any more.
        with contextlib.suppress(Exception):
            while True:
                await link.receive()
        nursery.cancel_scope.cancel()


async def _beat(links: list[Link], node: NodeId) -> None:
    epoch = Epoch(1, node, Incarnation(1))
    beat = Heartbeat(epoch, epoch, flushed=False, acting=True, needs_epoch=False, heard={})
    while True:
        for link in links:
            link.send(beat)
        await trio.sleep(BEAT_S)


def _nobody() -> Hello:
    random = secrets.SystemRandom()
    addresses = tuple(Address(host, 7777) for host in random.sample(BLACK_HOLES, 3))
    some = Member(NodeId(secrets.token_bytes(32)), Incarnation(random.randrange(1, 2**63)))
    return Hello(PROTOCOL_VERSION, some, SignedName("mac", bytes(64)), addresses)


def knock(order: AttackOrder) -> None:
    """Connect as a stranger from many addresses, up to 1,000 at once, and say things."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4 * AT_ONCE), most))
    _begin()
    trio.run(_knock, order)


async def _knock(order: AttackOrder) -> None:
    limit = trio.CapacityLimiter(AT_ONCE)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for number in range(order.count):
            await trio.sleep_until(began + order.seconds * number / order.count)
            await limit.acquire_on_behalf_of(number)
            nursery.start_soon(_knock_once, order, number, limit)
        await trio.sleep_until(began + order.seconds)
        nursery.cancel_scope.cancel()


async def _knock_once(order: AttackOrder, number: int, limit: trio.CapacityLimiter) -> None:
    peer = order.peers[number % len(order.peers)]
    port = PORT_OF_NOBODY if order.control else peer.port
    try:
        with trio.socket.socket() as connection, contextlib.suppress(OSError):
            await connection.bind((BLACK_HOLES[number % len(BLACK_HOLES)], 0))
            await connection.connect((peer.host, port))
            await connection.send(GARBAGE[number % len(GARBAGE)])
            with trio.move_on_after(order.seconds):
                while await connection.recv(4096):
                    pass
    finally:
        limit.release_on_behalf_of(number)


def local(order: AttackOrder) -> None:
    """Be a trainer that sends garbage; and another user, who must not even come that far."""
    random = Random(order.seed)  # noqa: S311 - repeats a run
    _begin(refused=_refused_to_strangers(order.path))
    for number in _paced(order):
        if order.control:
            continue
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
            connection.connect(order.path)
            said = random.randbytes(random.randrange(200))
            framed = struct.pack("!I", len(said)) + said
            connection.sendall((framed, *GARBAGE)[number % (len(GARBAGE) + 1)])


def _refused_to_strangers(path: str) -> bool:
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(path)
            except PermissionError:
                os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _begin(**facts: float) -> None:
    """Say that all is prepared, and wait for a line."""
    print(msgspec.json.encode(facts).decode(), flush=True)
    sys.stdin.readline()


def _paced(order: AttackOrder) -> Iterator[int]:
    """The numbers up to `count`, evenly over the time; those that come late, all at once."""
    began, done = time.monotonic(), 0
    while (passed := time.monotonic() - began) < order.seconds:
        due = int(order.count * passed / order.seconds)
        yield from range(done, due)
        done = due
        time.sleep(0.002)


def anything(order: AttackOrder) -> None:
    """Send all that a member can send: as one with a seat, and as others without one.

    The control sends the same to itself, and has an honest agent with a seat.
    """
    _begin()
    with tempfile.TemporaryDirectory(prefix="pm") as folder, contextlib.suppress(trio.TooSlowError):
        trio.run(_send_anything, order, Path(folder))


async def _send_anything(order: AttackOrder, folder: Path) -> None:
    mesh_key = mesh_key_from_text(os.environ["PMESH_KEY"])
    with trio.fail_after(order.seconds):
        async with trio.open_nursery() as nursery:
            begin, doors = folder / "begin", order.peers
            if order.control:
                sink = await nursery.start(_serve_sink, mesh_key)
                doors = (sink,) * len(doors)
            nursery.start_soon(_run_member_with_a_seat, order, folder, begin)
            attack = outsider.OutsiderAttack(
                doors=doors,
                mesh_key=lambda: mesh_key,
                liar=new_liar(order.seed),
                guest=new_guest(order.seed),
            )
            nursery.start_soon(attack.run)
            await trio.sleep(order.seconds / 10)
            begin.touch()


async def _run_member_with_a_seat(order: AttackOrder, home: Path, begin: Path) -> None:
    """An agent, with a rank of a job in which the others have one too."""
    seed = -1 if order.control else order.seed
    agent = AgentOrder(number=order.seed, seed=seed, log=str(home / "lies"), begin=str(begin))
    up = [msgspec.json.encode(agent).decode(), "up", "--name", "liar", "--no-mdns"]
    for peer in order.peers:
        up += ["--peer", str(peer)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run_module, home, "tools.fuzz.agent", *up)
        while True:  # until the agent is up, and again when the job has failed
            await _run_module(home, "tools.fuzz.honest", str(len(order.peers) + 1), "any", SHARED)
            await trio.sleep(1)


async def _run_module(home: Path, *words: str) -> None:
    environment = os.environ | {"PMESH_HOME": str(home)}
    with (home / "output").open("ab") as output:
        await trio.run_process(
            [sys.executable, "-m", *words],
            env=environment,
            stdout=output,
            stderr=output,
            check=False,
        )


async def _serve_sink(mesh_key: MeshKey, *, task_status: trio.TaskStatus[Address]) -> None:
    """Take links, and read all that comes."""
    contexts = TlsContexts.of(issue_credentials(mesh_key, NodeKey.from_seed(bytes(32))))
    me = hello_of(NodeKey.from_seed(bytes(32)), "sink")

    async def take(stream: trio.SocketStream) -> None:
        with contextlib.suppress(Exception):  # as in `_serve`
            link = await shake_hands(
                stream, contexts=contexts, server_side=True, hello=lambda _: me
            )
            await _serve(link)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, take, 0)
        port: int = listeners[0].socket.getsockname()[1]
        task_status.started(Address("127.0.0.1", port))


ATTACKS = {attack.__name__: attack for attack in (mdns, member, knock, local, anything)}

if __name__ == "__main__":
    ordered = msgspec.json.decode(sys.argv[1], type=AttackOrder)
    ATTACKS[ordered.kind](ordered)
    print("done", flush=True)
