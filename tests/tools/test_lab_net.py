"""The lab tested by real packets between its hosts."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.worlds.faults import Faults
from tools.lab import net
from tools.lab.net import PREFIX, LabHost, NetLab, clean, labs

pytestmark = pytest.mark.netns

# Prints its name for itself, then what it hears; ends with standard input.
LISTEN = """
import os, socket, struct, sys, threading
sock = socket.socket({family}, socket.SOCK_DGRAM)
sock.bind(("", 5000))
{join}
print("ready", flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True:
    print(sock.recv(100).decode(), flush=True)
"""
JOIN_IPV4 = (
    "sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP,"
    " socket.inet_aton('224.0.0.251') + bytes(4))"
)
SEND = "import socket, sys\ns = socket.socket({family}, socket.SOCK_DGRAM)\n{each}"


class Listener:
    """A program in a host that prints the datagrams it gets."""

    def __init__(self, host: LabHost, *, family: str = "socket.AF_INET", join: str = "") -> None:
        script = LISTEN.format(family=family, join=join)
        self.process = host.popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.next() == "ready"

    def next(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.communicate("", timeout=10)


@contextmanager
def listening(
    host: LabHost, *, family: str = "socket.AF_INET", join: str = ""
) -> Iterator[Listener]:
    listener = Listener(host, family=family, join=join)
    try:
        yield listener
    finally:
        listener.close()


def send(host: LabHost, address: str, *texts: str, family: str = "socket.AF_INET") -> None:
    each = f"for text in sys.argv[1:]: s.sendto(text.encode(), ({address!r}, 5000))"
    script = SEND.format(family=family, each=each)
    # -S -E: without site-packages, which cost more than the test.
    host.run([sys.executable, "-SE", "-c", script, *texts])


@pytest.fixture
def lab() -> Iterator[NetLab]:
    with NetLab(2) as lab:
        yield lab


def test_hosts_reach_each_other_over_both_families(lab: NetLab) -> None:
    one, two = lab.hosts
    with listening(two, family="socket.AF_INET6") as heard:
        send(one, two.ipv6, "six", family="socket.AF_INET6")
        assert heard.next() == "six"
        send(one, f"fe80::{two.number}%eth0", "local", family="socket.AF_INET6")
        assert heard.next() == "local"
    with listening(two) as heard:
        send(one, two.ipv4, "four")
        assert heard.next() == "four"


def test_multicast_reaches_who_has_joined(lab: NetLab) -> None:
    one, two = lab.hosts
    with listening(two, join=JOIN_IPV4) as heard:
        send(one, "224.0.0.251", "to all")
        assert heard.next() == "to all"


def test_a_host_has_loopback_and_no_way_out(lab: NetLab) -> None:
    (host, _) = lab.hosts
    assert "127.0.0.1" in host.run(["ip", "-brief", "address", "show", "lo"])
    assert "default" not in host.run(["ip", "route"]) + host.run(["ip", "-6", "route"])


def test_a_one_way_cut_stops_that_way_alone(lab: NetLab) -> None:
    one, two = lab.hosts
    with listening(one) as heard_by_one, listening(two) as heard_by_two:
        lab.cut(one, two, one_way=True)
        send(two, one.ipv4, "from two")
        assert heard_by_one.next() == "from two"
        send(one, two.ipv4, "lost")
        lab.mend(one, two)
        send(one, two.ipv4, "mended")
        assert heard_by_two.next() == "mended"


def test_a_cut_stops_both_ways_and_multicast_too(lab: NetLab) -> None:
    one, two = lab.hosts
    with listening(one) as heard_by_one, listening(two, join=JOIN_IPV4) as heard_by_two:
        lab.cut(one)
        send(one, "224.0.0.251", "lost")
        send(two, one.ipv4, "lost")
        lab.mend(one)
        send(one, "224.0.0.251", "mended")
        send(two, one.ipv4, "mended")
        assert heard_by_one.next() == "mended"
        assert heard_by_two.next() == "mended"


def test_a_pulled_cable_takes_the_carrier_and_leaves_the_addresses(lab: NetLab) -> None:
    one, two = lab.hosts
    show = ["ip", "-brief", "address", "show", "eth0"]
    lab.unplug(one)
    assert "DOWN" in one.run(show)
    lab.plug(one)
    assert one.ipv4 in one.run(show)
    assert one.ipv6 in one.run(show)
    with listening(one) as heard:
        send(two, one.ipv4, "back")
        assert heard.next() == "back"


def test_packets_are_lost_in_the_given_share(lab: NetLab) -> None:
    one, two = lab.hosts
    with listening(two) as heard:
        lab.lose(50)
        send(one, two.ipv4, *(f"{n}" for n in range(200)))
        lab.lose(0)
        send(one, two.ipv4, "end")
        arrived = 0
        while heard.next() != "end":
            arrived += 1
    assert 50 <= arrived <= 150  # 7 standard deviations


def test_an_exception_ends_the_lab_and_what_runs_in_it() -> None:
    with contextlib.suppress(ZeroDivisionError), NetLab(1) as lab:
        sleeper = lab.hosts[0].popen(["sleep", "1000"])
        _ = 1 / 0
    assert sleeper.wait(timeout=10) == -signal.SIGKILL
    assert lab.name not in labs()


def test_a_process_that_has_not_reached_its_host_yet_ends_with_the_lab() -> None:
    yes = shutil.which("yes")  # `ip` would be there at once; this has its arguments and never is
    assert yes is not None
    with NetLab(1) as lab:
        command = lab.hosts[0].command(["sleep", "1000"])
        late = subprocess.Popen(command, executable=yes, stdout=subprocess.PIPE)
    with late:
        assert late.wait(timeout=10) == -signal.SIGKILL


def test_a_lab_that_fails_while_it_is_built_leaves_nothing(faults: Faults) -> None:
    def mine() -> set[str]:  # who starts a tool meanwhile may try whether it can make a lab
        return {name for name in labs() if name.startswith(f"{PREFIX}-{os.getpid()}-")}

    before = mine()

    faults.fail(NetLab, "_plug_in", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        NetLab(1).__enter__()
    assert mine() == before


def test_clean_removes_labs_of_killed_owners_only(monkeypatch: pytest.MonkeyPatch) -> None:
    # With names of their own: a tool that another worker starts meanwhile cleans up, too.
    own = f"lab{os.getpid()}"
    monkeypatch.setattr(net, "PREFIX", own)
    script = (
        f"from tools.lab import net; net.PREFIX = {own!r}; lab = net.NetLab(1).__enter__()\n"
        "lab.hosts[0].popen(['sleep', '1000']); print(lab.name, flush=True); input()"
    )
    with (
        NetLab(1) as lab,
        subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as owner,
    ):
        assert owner.stdout is not None
        left = owner.stdout.readline().strip()
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        assert left in labs()

        assert clean() == [left]

        assert left not in labs()
        assert lab.name in labs()


def test_a_cut_in_one_network_leaves_the_other_alone() -> None:
    with NetLab(2, networks=2) as lab:
        one, two = lab.hosts
        with listening(two) as heard:
            lab.cut(one, two, network=0)
            send(one, two.ipv4_in(0), "lost")
            send(one, two.ipv4_in(1), "over the other")
            assert heard.next() == "over the other"
            assert lab.carried_bytes(one, 1) > len("over the other")
            lab.mend(one)
            send(one, two.ipv4_in(0), "mended")
            assert heard.next() == "mended"
