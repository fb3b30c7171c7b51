"""Lanes over several connections in one process, over real sockets."""

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import trio

from pmesh.core.wire.lanes import OfferLane
from pmesh.net.lanes.lane import Lane
from pmesh.net.lanes.multipath import MultipathLane
from pmesh.net.lanes.opening import offer_of_connection
from pmesh.net.lanes.subflows import ConnectionFacts
from tests.worlds.lanes import Web, offer_between

UNKNOWN = ConnectionFacts()


Ends: TypeAlias = tuple[socket.socket, socket.socket]


def sockets(*, buffer_bytes: int | None = None, tcp: bool = False) -> Ends:
    """Two that are connected: of the sender, and of the receiver."""
    ends = _tcp_pair() if tcp else socket.socketpair()
    if buffer_bytes is not None:
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    return ends


def connections(offer: OfferLane, index: int, ends: Ends) -> tuple[Lane, Lane]:
    """The two ends of one connection of a lane, as if they had greeted."""
    part = offer_of_connection(offer, index)
    sending = Lane(ends[0], part, sending=True, peer="mac-1")
    receiving = Lane(ends[1], part, sending=False, peer="mac-0")
    sending.hosts = receiving.hosts = f"path-{index}", f"path-{index}"
    return sending, receiving


def _tcp_pair() -> Ends:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        return dialled, listener.accept()[0]


def drop(lane: MultipathLane, name: str) -> None:
    """Lose a path at one end."""
    lane.drop({name}, {name})


def names_of(lane: MultipathLane) -> set[str]:
    """Return the paths of the connections that are in use."""
    names = {f"path-{index}" for index in range(100)}
    return {name for name in names if lane.runs_between({name}, {name})}


@dataclass
class Paths:
    """Both ends of a lane, and how to give it one more path."""

    sending: MultipathLane
    receiving: MultipathLane
    offer: OfferLane
    buffer_bytes: int | None
    tcp: bool
    sockets: list[Ends]
    """Those of each connection, in the order in which they were made."""
    made: int = field(default=1)
    stalled: list[Lane] = field(default_factory=list)

    def add(self, facts: ConnectionFacts = UNKNOWN, *, stalled: bool = False) -> str:
        """Return the new path's name. A stalled one takes a little, and brings nothing."""
        index, self.made = self.made, self.made + 1
        sends, receives = self._connect(index)
        if stalled:
            self.stalled.append(receives)
            unused, receives = self._connect(index)
            self.stalled.append(unused)
        self.sending.join(sends, index, facts)
        self.receiving.join(receives, index, facts)
        return f"path-{index}"

    def _connect(self, index: int) -> tuple[Lane, Lane]:
        self.sockets.append(sockets(buffer_bytes=self.buffer_bytes, tcp=self.tcp))
        return connections(self.offer, index, self.sockets[-1])


def open_paths(
    offer: OfferLane, count: int, *, buffer_bytes: int | None = None, tcp: bool = False
) -> Paths:
    """A lane with so many paths, path-0 and so on, whose ends nobody tends yet."""
    ends = sockets(buffer_bytes=buffer_bytes, tcp=tcp)
    first = connections(offer, 0, ends)
    lanes = [MultipathLane(end, ConnectionFacts(), offer) for end in first]
    made = Paths(lanes[0], lanes[1], offer, buffer_bytes, tcp, [ends])
    for _ in range(count - 1):
        made.add()
    return made


@asynccontextmanager
async def paths_between(
    count: int = 2, *, buffer_bytes: int | None = None, tcp: bool = False
) -> AsyncGenerator[Paths]:
    """A lane with so many paths, path-0 and so on; `buffer_bytes` makes them slow."""
    offer = offer_between(0, 1, several=True)
    made = open_paths(offer, count, buffer_bytes=buffer_bytes, tcp=tcp)
    lanes = made.sending, made.receiving
    async with trio.open_nursery() as nursery:
        for lane in lanes:
            nursery.start_soon(lane.tend)
        try:
            yield made
        finally:
            for lane in lanes:
                lane.close()
            for end in made.stalled:
                end.close()
            nursery.cancel_scope.cancel()


@dataclass
class CabledWeb(Web):
    """All lanes have some paths."""

    nursery: trio.Nursery = field(kw_only=True)
    paths: list[Paths] = field(default_factory=list)

    def _open(self, rank: int, peer: int) -> None:
        offer = offer_between(rank, peer, several=True)
        made = open_paths(offer, 2, buffer_bytes=self.buffer_bytes)
        for lane in (made.sending, made.receiving):
            self.nursery.start_soon(lane.tend)
        self.paths.append(made)
        self.sending[rank, peer], self.receiving[rank, peer] = made.sending, made.receiving


@asynccontextmanager
async def cabled_web(*, buffer_bytes: int | None = None) -> AsyncGenerator[CabledWeb]:
    """As `web`; `buffer_bytes` makes the network slow."""
    async with trio.open_nursery() as nursery:
        lanes = CabledWeb(buffer_bytes=buffer_bytes, nursery=nursery)
        try:
            yield lanes
        finally:
            lanes.close()
            nursery.cancel_scope.cancel()
