"""What keeps an agent from starting, or a trainer from finding one: said in a line, with a cure."""

import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pmesh.home_paths import socket_path
from tests.e2e.harness import Fleet, StartedAgent

pytestmark = pytest.mark.slow

CONNECT = """
import pmesh
try:
    with pmesh.connect(job="x", timeout_s=10) as mesh:
        print("rank", mesh.rank)
except pmesh.PmeshError as e:
    print(f"{type(e).__name__}: {e}")
"""


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Fleet, StartedAgent]]:
    with Fleet() as fleet:
        agent = fleet.start_agent("mac-1", "--no-mdns")
        agent.await_status(lambda _: True)
        yield fleet, agent


def refusal(agent: StartedAgent) -> str:
    """The one line with which it did not start."""
    (line,) = agent.process.await_end(code=1).splitlines()
    return line


def test_a_second_agent_in_a_home_or_at_a_port_is_refused(
    running: tuple[Fleet, StartedAgent],
) -> None:
    fleet, agent = running
    same_home = fleet.start_agent("mac-1", "--no-mdns")
    same_port = fleet.start_agent("mac-2", "--no-mdns", listen=agent.address)
    port = agent.address.rpartition(":")[2]

    home, taken = refusal(same_home), refusal(same_port)

    assert home.startswith(f"AgentAlreadyRunning: an agent already runs in {agent.home}")
    assert f"pid {agent.process.pid};" in home
    assert taken.startswith(f"PortTaken: port {port} is taken by another program")
    assert "--listen HOST:PORT" in taken
    assert fleet.start_trainer(agent, CONNECT).await_end() == "rank 0"  # the first goes on


def test_a_killed_agent_leaves_a_socket_that_says_so_and_is_replaced_silently(
    running: tuple[Fleet, StartedAgent],
) -> None:
    fleet, _ = running
    killed = fleet.start_agent("mac-3", "--no-mdns")
    killed.await_status(lambda _: True)
    killed.process.send_signal(signal.SIGKILL)
    killed.process.await_end(code=-signal.SIGKILL)
    path = socket_path(killed.home)
    assert path.is_socket()

    alone = fleet.start_trainer(killed, CONNECT).await_end()
    again = fleet.start_agent("mac-3", "--no-mdns")
    again.await_status(lambda _: True)

    assert alone.startswith("AgentNotRunning: ")
    assert str(path) in alone
    assert "'pmesh up'" in alone
    assert fleet.start_trainer(again, CONNECT).await_end() == "rank 0"
    assert again.process.output.splitlines()[0].startswith("mac-3 is up")


def spoil_for_others(home: Path) -> None:
    (home / "node_key").write_bytes(bytes(32))
    (home / "node_key").chmod(0o644)


def spoil_by_cutting(home: Path) -> None:
    (home / "node_key").write_bytes(bytes(31))
    (home / "node_key").chmod(0o600)


def spoil_the_mesh_key(home: Path) -> None:
    (home / "mesh_key").write_text("pmesh-not-a-key\n")
    (home / "mesh_key").chmod(0o600)


def test_key_files_that_can_not_be_used_are_refused_with_what_mends_them(
    running: tuple[Fleet, StartedAgent],
) -> None:
    fleet, _ = running
    spoilers = {"open": spoil_for_others, "cut": spoil_by_cutting, "wrong": spoil_the_mesh_key}
    for name, spoil in spoilers.items():
        fleet.home(name).mkdir(mode=0o700)
        spoil(fleet.home(name))

    def start_all() -> list[StartedAgent]:
        return [
            fleet.start_agent(name, "--no-mdns", mesh_key="" if name == "wrong" else None)
            for name in spoilers
        ]

    for line in map(refusal, start_all()):
        assert line.startswith("KeyFileError: ")
        cure = re.search(r"((?:chmod|mv) [^,;]*)", line)
        assert cure is not None, line
        subprocess.run(shlex.split(cure[1]), check=True)

    for agent in start_all():
        agent.process.await_line(f"^{agent.name} is up")


def test_too_few_open_files_are_raised_or_said_at_start(
    running: tuple[Fleet, StartedAgent],
) -> None:
    fleet, _ = running
    soft = fleet.start_agent("soft", under=("sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh"))
    hard = fleet.start_agent("hard", under=("sh", "-c", 'ulimit -n 64; exec "$@"', "sh"))

    assert hard.process.await_line("only 64 files may be open.*")[0].endswith(
        "raise it with 'ulimit -n 1024' before 'pmesh up'"
    )
    fleet.await_view(soft, hard)  # it works all the same
    assert "files may be open" not in soft.process.output


def test_an_agent_outlives_a_full_disk_under_its_log(running: tuple[Fleet, StartedAgent]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("only Linux has a device that is always full")
    fleet, _ = running
    into_full = ("sh", "-c", 'exec "$@" >/dev/full 2>&1', "sh")
    nobody = ("--peer", "127.0.0.1:1")  # for a line in the log
    mute = fleet.start_agent("mute", "--no-mdns", *nobody, under=into_full)
    mute.await_status(lambda _: True)
    other = fleet.start_agent("other", "--no-mdns", "--peer", mute.address)
    fleet.await_view(mute, other)  # both have said so

    assert fleet.start_trainer(mute, CONNECT).await_end() == "rank 0"
    fleet.pmesh("down", home=other.home)
    fleet.await_view(mute)
    mute.process.send_signal(signal.SIGTERM)
    mute.process.await_end()
