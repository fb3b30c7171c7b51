"""Where ranks run: on the loopback of this machine, or one in each host of a network lab."""

import contextlib
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.virtual_lan import Host, NetLab

FIRST_PORT = 5100  # in a lab, where nothing else listens


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """So many ranks, each with an address of its own or all with one."""

    ranks: int
    hosts: tuple[Host, ...] = field(default=())
    """None of them: loopback."""

    @property
    def interface(self) -> str:
        """The network interface that the ranks share."""
        return "eth0" if self.hosts else "lo"

    def address(self, rank: int) -> str:
        """IPv4."""
        return self.hosts[rank].ipv4 if self.hosts else "127.0.0.1"

    def free_ports(self) -> list[int]:
        """One for each rank."""
        if self.hosts:
            return [FIRST_PORT] * self.ranks
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(self.ranks)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            return [each.getsockname()[1] for each in sockets]

    def popen(self, rank: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:  # noqa: ANN401 - Popen's own
        """The command, started where the rank lives."""
        if self.hosts:
            return self.hosts[rank].popen(command, **options)
        return subprocess.Popen(command, text=True, **options)


@contextlib.contextmanager
def loopback(ranks: int) -> Iterator[Place]:
    """All ranks on this machine's loopback."""
    yield Place(ranks=ranks)


@contextlib.contextmanager
def shaped_lan(ranks: int, *, bits_per_s: int | None) -> Iterator[Place]:
    """A host for each rank, each with a line of so many bits a second in either direction.

    None: as fast as the kernel is.
    """
    with NetLab(ranks) as lab:
        for host in lab.hosts:
            lab.shape(host, bits_per_s=bits_per_s)
        yield Place(ranks=ranks, hosts=lab.hosts)
