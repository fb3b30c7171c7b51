"""Several hosts on one machine: network namespaces on a bridge, with links to cut, shape and lose.

Each host has an address of its own, IPv4 and IPv6, in a network that leads nowhere else; multicast
works, and nobody is told of anybody. The bridge has a namespace too, so the machine's own network
is never touched, labs don't collide, and deleting a lab's namespaces leaves nothing. Linux, root.

    with NetLab(3) as lab:
        lab.hosts[0].run(["ping", "-c1", lab.hosts[1].ipv4])
        lab.cut(lab.hosts[0], lab.hosts[1])

And the same at a shell, where hosts are numbered from 1:

    $ sudo .venv/bin/python tools/lab/net.py shell -n 3      # a shell; the lab ends with it
    # netlab run 1 -- ping -c1 10.77.0.2
    # netlab cut 1 2 ; netlab mend 1 2
    # netlab shape 3 100                                    # Mbit/s
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Self

import cyclopts
import psutil

PREFIX = "pmeshlab"  # of every namespace; the number after it is the pid of the lab's owner
# Questions for a neighbour's hardware address always pass. Else a one-way cut would soon cut both
# ways (no packet is sent to who can't be asked), and what waits for the answer would come late.
CUT_TABLE = """
table bridge lab {
    set cut { type ifname . ifname; }
    chain loss {}
    chain forward {
        type filter hook forward priority 0; policy accept;
        ether type arp accept
        icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept
        iifname . oifname @cut counter drop
        jump loss
    }
}
"""
# Between two bursts of the shaper the queue holds this long: a home router's buffer, roughly.
QUEUE_S = 0.1
# What Linux and macOS have unless somebody changes it, as on some rented machines.
CONGESTION_CONTROL = "net.ipv4.tcp_congestion_control=cubic"
KILL_DEADLINE_S = 5.0
_labs = itertools.count()


class NetLabError(Exception):
    """A command of the lab failed, or this kernel lacks what was asked for."""


def run_system(command: Sequence[str], *, stdin: str = "") -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetLabError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def why_not() -> str | None:
    """Why no lab can be made here, for a test to say when it is skipped; None if one can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "nft", "tc") if shutil.which(tool) is None]
    if missing:
        return f"missing: {', '.join(missing)} (apt install iproute2 nftables)"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    try:
        run_system(["ip", "netns", "add", probe])
        run_system(["ip", "netns", "del", probe])
    except NetLabError as e:
        return f"no network namespaces in this container: {e}"
    return None


@dataclass(frozen=True, slots=True)
class LabHost:
    """One machine of a lab."""

    lab: str
    """Its name; empty on this machine's loopback."""
    number: int
    """From 1; it is the last part of both addresses."""

    @property
    def name(self) -> str:
        """`h1`; also its port on the switch."""
        return f"h{self.number}"

    @property
    def namespace(self) -> str:
        """As `ip netns` knows it."""
        return f"{self.lab}-{self.name}"

    @property
    def ipv4(self) -> str:
        """Of eth0, its interface in the first network."""
        return self.ipv4_in(0)

    def ipv4_in(self, network: int) -> str:
        """Of its interface in this network: eth0 in network 0, eth1 in network 1, and so on."""
        return f"10.{77 + network}.0.{self.number}"

    def port(self, network: int) -> str:
        """The other end of the cable, at the switch."""
        return f"{self.name}-{network}" if network else self.name

    @property
    def ipv6(self) -> str:
        """The global one; the link-local one is fe80:: and the same number."""
        return f"fd77::{self.number}"

    def command(self, command: Sequence[str]) -> list[str]:
        """What runs `command` in this host; `ip` replaces itself, so pid and signals are its."""
        return [*_enter(self.namespace), *command]

    def run(self, command: Sequence[str], *, timeout_s: float = 30.0) -> str:
        """What the command printed; raises CalledProcessError or TimeoutExpired."""
        return subprocess.run(
            self.command(command), stdout=subprocess.PIPE, text=True, check=True, timeout=timeout_s
        ).stdout

    def pids(self) -> list[int]:
        """The processes that run in this host; a zombie has left it already."""
        return [int(pid) for pid in run_system(["ip", "netns", "pids", self.namespace]).split()]

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:  # noqa: ANN401 - Popen's own
        """The command, started; what still runs when the lab closes is killed."""
        return subprocess.Popen(self.command(command), text=True, **options)


class Loopback(LabHost):
    """This machine itself, as one of several: it shares its address with the others."""

    def ipv4_in(self, network: int) -> str:  # noqa: ARG002 - a host's
        return "127.0.0.1"

    def command(self, command: Sequence[str]) -> list[str]:
        return [*command]


def loopbacks(count: int) -> tuple[LabHost, ...]:
    """So many hosts that are this machine."""
    return tuple(Loopback("", number) for number in range(1, count + 1))


class NetLab:
    """A switch and `count` hosts on it, from `with` to its end, however that comes.

    With several networks each host has an interface in each: eth0, eth1, and so on.
    """

    def __init__(self, count: int, *, networks: int = 1) -> None:
        self._networks = networks
        if not 1 <= count <= 250:  # noqa: PLR2004 - one octet of the address
            raise NetLabError(f"a lab has 1 to 250 hosts, not {count}")
        self.name = f"{PREFIX}-{os.getpid()}-{next(_labs)}"
        self.hosts = tuple(LabHost(self.name, number) for number in range(1, count + 1))

    @classmethod
    def running(cls, name: str) -> Self:
        """The lab of that name, made by another process that also ends it."""
        lab = cls(1)
        lab.name = name
        lab.hosts = tuple(
            LabHost(name, number)
            for number in sorted(
                int(namespace.rpartition("-h")[2])
                for namespace in _namespaces()
                if namespace.startswith(f"{name}-h")
            )
        )
        return lab

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:  # a Ctrl-C while it is built must leave nothing either
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _switch(self) -> str:
        return f"{self.name}-switch"

    def _in_switch(self, command: str, *, stdin: str = "") -> None:
        run_system([*_enter(self._switch), *command.split()], stdin=stdin)

    def _build(self) -> None:
        run_system(["ip", "netns", "add", self._switch])
        # No snooping: without a router's queries a bridge would forget who wants multicast.
        for network in range(self._networks):
            bridge = _bridge(network)
            self._in_switch(f"ip link add {bridge} up type bridge forward_delay 0 mcast_snooping 0")
        self._in_switch("nft -f -", stdin=CUT_TABLE)
        for host in self.hosts:
            self._plug_in(host)

    def _plug_in(self, host: LabHost) -> None:
        run_system(["ip", "netns", "add", host.namespace])
        veth = f"link add eth0 type veth peer name {host.name} netns {self._switch}"
        self._set_up(host, veth)
        self._in_switch(f"ip link set {host.name} master bridge up")
        for network in range(1, self._networks):
            self._plug_in_again(host, network)

    def _plug_in_again(self, host: LabHost, network: int) -> None:
        device, port = f"eth{network}", host.port(network)
        commands = f"""
            link add {device} type veth peer name {port} netns {self._switch}
            link set {device} addrgenmode none
            link set {device} up
            addr add {host.ipv4_in(network)}/24 broadcast + dev {device}
            addr add fe80::{network}:{host.number}/64 dev {device} nodad
        """
        run_system(["ip", "-netns", host.namespace, "-batch", "-"], stdin=commands)
        self._in_switch(f"ip link set {port} master {_bridge(network)} up")

    def _set_up(self, host: LabHost, eth0: str = "") -> None:
        """Give the host its addresses; `eth0` makes the interface if it is not there yet."""
        commands = f"""
            link set lo up
            {eth0}
            link set eth0 addrgenmode none
            link set eth0 up
            addr add {host.ipv4}/24 broadcast + dev eth0
            addr add {host.ipv6}/64 dev eth0 nodad
            addr add fe80::{host.number}/64 dev eth0 nodad
            route add 224.0.0.0/4 dev eth0
        """  # nodad: an address that is still being checked can't be bound, for a second or two
        run_system(["ip", "-netns", host.namespace, "-batch", "-"], stdin=commands)
        run_system([*_enter(host.namespace), "sysctl", "-qw", CONGESTION_CONTROL])

    def cut(
        self, one: LabHost, *others: LabHost, one_way: bool = False, network: int | None = None
    ) -> None:
        """Packets from `one` to the others (to all, if none is named) vanish, and back as well.

        Those in one network, or in all of them.
        """
        self._cut("add", one, others, one_way=one_way, network=network)

    def mend(self, one: LabHost, *others: LabHost) -> None:
        """Undo `cut`, both ways and in all networks."""
        # An element that is added once more is no error; one deleted that isn't there would be.
        self._cut("add", one, others)
        self._cut("delete", one, others)

    def _cut(
        self,
        verb: Literal["add", "delete"],
        one: LabHost,
        others: Sequence[LabHost],
        *,
        one_way: bool = False,
        network: int | None = None,
    ) -> None:
        others = others or [host for host in self.hosts if host != one]
        pairs = [(one, other) for other in others]
        if not one_way:
            pairs += [(other, one) for other in others]
        if pairs:
            networks = list(range(self._networks)) if network is None else [network]
            self._change_cuts(verb, pairs, networks)

    def _change_cuts(
        self,
        verb: Literal["add", "delete"],
        pairs: Sequence[tuple[LabHost, LabHost]],
        networks: Sequence[int],
    ) -> None:
        """In one transaction: all of them at the same instant."""
        elements = ", ".join(f"{a.port(n)} . {b.port(n)}" for a, b in pairs for n in networks)
        self._in_switch("nft -f -", stdin=f"{verb} element bridge lab cut {{ {elements} }}\n")

    def unplug(self, host: LabHost, network: int = 0) -> None:
        """Pull the cable: unlike with `cut` the host's interface loses its carrier."""
        self._in_switch(f"ip link set {host.port(network)} down")

    def plug(self, host: LabHost, network: int = 0) -> None:
        """Undo `unplug`."""
        self._in_switch(f"ip link set {host.port(network)} up")

    def carried_bytes(self, host: LabHost, network: int = 0) -> int:
        """What the host has sent and received over one of its cables, all headers included."""
        show = ["ip", "-json", "-s", "-netns", host.namespace, "link", "show"]
        (link,) = json.loads(run_system([*show, "dev", f"eth{network}"]))
        counters = link["stats64"]
        return int(counters["rx"]["bytes"] + counters["tx"]["bytes"])

    def lose(self, percent: float) -> None:
        """Each packet on any way is lost with this probability; 0 to end that."""
        rule = f"add rule bridge lab loss numgen random mod 10000 < {round(percent * 100)} drop\n"
        flush = "flush chain bridge lab loss\n"
        self._in_switch("nft -f -", stdin=flush + (rule if percent else ""))

    def shape(
        self, host: LabHost, *, bits_per_s: int | None, delay_s: float = 0.0, network: int = 0
    ) -> None:
        """A slower line for the host, alike in both directions; None and 0 for the bare one.

        Args:
            host: Whose line.
            bits_per_s: Its bandwidth; None for no limit.
            delay_s: One way. Needs the kernel's netem, which not every kernel has.
            network: Which of the host's lines.

        Raises:
            NetLabError: This kernel can't delay packets; the line is as it was.
        """
        for namespace, device in (
            (self._switch, host.port(network)),
            (host.namespace, f"eth{network}"),
        ):
            tc = ["tc", "-netns", namespace, "qdisc"]
            if delay_s:
                rate = ["rate", f"{bits_per_s}bit"] if bits_per_s else []
                delay = ["netem", "delay", f"{delay_s * 1e6:.0f}us", *rate, "limit", "100000"]
                try:
                    run_system([*tc, "replace", "dev", device, "root", *delay])
                except NetLabError as e:
                    raise NetLabError(f"this kernel has no netem: no delay here ({e})") from e
            elif bits_per_s:
                # A bucket of 4 ms, and never less than the 64 KiB that the sender's kernel makes
                # of one write: a smaller one would cut each into packets, and cost CPU.
                bucket = ["burst", str(max(65536, bits_per_s // 2000))]
                tbf = ["tbf", "rate", f"{bits_per_s}bit", *bucket, "latency", f"{QUEUE_S}s"]
                run_system([*tc, "replace", "dev", device, "root", *tbf])
            elif "noqueue" not in run_system([*tc, "show", "dev", device, "root"]):
                run_system([*tc, "delete", "dev", device, "root"])

    def shape_pairs(self, bits_per_s: Mapping[tuple[LabHost, LabHost], int]) -> None:
        """A line of its own between each two hosts, alike in both directions."""
        for host in self.hosts:
            tc = ["tc", "-netns", host.namespace]
            run_system([*tc, "qdisc", "replace", "dev", "eth0", "root", "handle", "1:", "htb"])
            for (one, other), speed in bits_per_s.items():
                if host in (one, other):
                    self._shape_to(other if host == one else one, tc, speed)

    def _shape_to(self, far: LabHost, tc: Sequence[str], bits_per_s: int) -> None:
        number = f"1:{far.number:x}"
        rate = ["htb", "rate", f"{bits_per_s}bit", "burst", "65536", "quantum", "65536"]
        run_system([*tc, "class", "add", "dev", "eth0", "parent", "1:", "classid", number, *rate])
        queue = ["bfifo", "limit", str(max(131072, round(bits_per_s * QUEUE_S / 8)))]
        run_system([*tc, "qdisc", "add", "dev", "eth0", "parent", number, *queue])
        for protocol, match, address in (
            ("ip", "ip", f"{far.ipv4}/32"),
            ("ipv6", "ip6", f"{far.ipv6}/128"),
            ("ipv6", "ip6", f"fe80::{far.number}/128"),
        ):
            prio = "1" if protocol == "ip" else "2"
            where = ["filter", "add", "dev", "eth0", "parent", "1:", "protocol", protocol]
            to = ["prio", prio, "u32", "match", match, "dst", address, "flowid", number]
            run_system([*tc, *where, *to])

    def close(self) -> None:
        """End what runs in the hosts, then take the lab down; nothing if that is done already."""
        _remove(self.name)


def _enter(namespace: str) -> list[str]:
    return ["ip", "netns", "exec", namespace]


def _bridge(network: int) -> str:
    return f"bridge{network}" if network else "bridge"


def _namespaces() -> list[str]:
    listed: list[dict[str, Any]] = json.loads(run_system(["ip", "-json", "netns", "list"]) or "[]")
    return [entry["name"] for entry in listed if entry["name"].startswith(f"{PREFIX}-")]


def _remove(lab: str) -> None:
    namespaces = [name for name in _namespaces() if name.startswith(f"{lab}-")]
    for namespace in namespaces:
        _kill_all(namespace)
    for namespace in namespaces:
        run_system(["ip", "netns", "del", namespace])


def _kill_all(namespace: str) -> None:
    """Until none is left: one may start another while we look."""
    deadline = time.monotonic() + KILL_DEADLINE_S
    while pids := [*_entering(namespace), *_running(namespace)]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise NetLabError(f"processes {pids} in {namespace} can't be killed")
        time.sleep(0.01)


def _entering(namespace: str) -> list[int]:
    """Those that a busy machine has not let in yet; asked for first, since who is not one is in."""
    enter = _enter(namespace)
    listed = psutil.process_iter(["cmdline"])
    return [
        process.pid for process in listed if (process.info["cmdline"] or [])[: len(enter)] == enter
    ]


def _running(namespace: str) -> list[int]:
    # A zombie has left its namespace already, so whoever started it need not have reaped it.
    return [int(pid) for pid in run_system(["ip", "netns", "pids", namespace]).split()]


def labs() -> list[str]:
    """The names of all labs on this machine."""
    return sorted({namespace.rpartition("-")[0] for namespace in _namespaces()})


def clean() -> list[str]:
    """Remove the labs whose owner was killed; those of living processes stay."""
    dead = [lab for lab in labs() if not psutil.pid_exists(int(lab.split("-")[1]))]
    for lab in dead:
        _remove(lab)
    return dead


LAB_VARIABLE = "NETLAB"  # in the lab's shell: the lab that its commands mean
app = cyclopts.App(name="netlab", help=__doc__, help_format="plaintext", version_flags=[])


def _lab() -> NetLab:
    here = [os.environ[LAB_VARIABLE]] if LAB_VARIABLE in os.environ else labs()
    if len(here) != 1:
        found = (
            f"several run: set {LAB_VARIABLE} to one of {', '.join(here)}" if here else "none runs"
        )
        raise NetLabError(f"which lab? {found}")
    return NetLab.running(here[0])


def _host(lab: NetLab, number: int) -> LabHost:
    for host in lab.hosts:
        if host.number == number:
            return host
    raise NetLabError(f"{lab.name} has no host {number}, only {len(lab.hosts)} of them")


def _describe(lab: NetLab) -> None:
    print(lab.name)
    for host in lab.hosts:
        print(f"  {host.number}  {host.ipv4:12}  {host.ipv6:9}  {host.namespace}")


@app.command
def shell(*, count: Annotated[int, cyclopts.Parameter(alias="-n")] = 3) -> int:
    """Make a lab and open a shell that has `netlab` as a command; the lab ends with the shell."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # else they would end us without the lab's end
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with NetLab(count) as lab, tempfile.TemporaryDirectory() as folder:
        command = Path(folder, "netlab")
        command.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" "$@"\n'
        )
        command.chmod(0o700)
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        _describe(lab)
        print("netlab run 1 -- COMMAND, netlab --help; the lab ends with this shell.", flush=True)
        return subprocess.run(
            [os.environ.get("SHELL", "/bin/sh")],
            env=os.environ | {LAB_VARIABLE: lab.name, "PATH": path},
            check=False,
        ).returncode


@app.command
def run(host: int, *command: Annotated[str, cyclopts.Parameter(allow_leading_hyphen=True)]) -> None:
    """Run a command in a host: `netlab run 1 -- ping -c1 10.77.0.2`."""
    inside = _host(_lab(), host).command(command)
    os.execvp(inside[0], inside)  # noqa: S606 - the command takes our place: terminal, signals, code


@app.command
def cut(host: int, *others: int, one_way: bool = False) -> None:
    """Let packets between a host and the others (all, if none is named) vanish.

    Args:
        host: One end.
        others: The other ends.
        one_way: Only those from `host` vanish.
    """
    lab = _lab()
    lab.cut(_host(lab, host), *(_host(lab, other) for other in others), one_way=one_way)


@app.command
def mend(host: int, *others: int) -> None:
    """Undo cut."""
    lab = _lab()
    lab.mend(_host(lab, host), *(_host(lab, other) for other in others))


@app.command
def unplug(host: int) -> None:
    """Pull a host's cable: unlike with cut, its interface loses the carrier."""
    lab = _lab()
    lab.unplug(_host(lab, host))


@app.command
def plug(host: int) -> None:
    """Undo unplug."""
    lab = _lab()
    lab.plug(_host(lab, host))


@app.command
def shape(host: int, mbit: float | None = None, *, delay_ms: float = 0.0) -> None:
    """Give a host a slower line, alike in both directions; without a number the bare one again.

    Args:
        host: Whose line.
        mbit: Bandwidth in Mbit/s.
        delay_ms: One way; only where the kernel has netem.
    """
    lab = _lab()
    bits_per_s = None if mbit is None else round(mbit * 1e6)
    lab.shape(_host(lab, host), bits_per_s=bits_per_s, delay_s=delay_ms / 1000)


@app.command
def lose(percent: float) -> None:
    """Lose this share of all packets; 0 ends that."""
    _lab().lose(percent)


@app.command(name="list")
def list_labs() -> None:
    """List the labs of this machine and their hosts."""
    for name in labs():
        _describe(NetLab.running(name))


@app.command(name="clean")
def clean_up() -> None:
    """Remove labs that were left by killed processes; others stay."""
    for name in clean():
        print(f"removed {name}")


def main() -> int:
    """The command line; errors are one line."""
    reason = why_not()
    if reason is not None:
        print(f"netlab: {reason}", file=sys.stderr)
        return 1
    try:
        return app(result_action="return_int_as_exit_code_else_zero") or 0
    except NetLabError as e:
        print(f"netlab: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
