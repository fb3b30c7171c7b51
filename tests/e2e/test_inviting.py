"""`pmesh invite` and `pmesh join`: a bare machine becomes a member by a short code."""

import contextlib
import re
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pmesh.core.identity.keys import mesh_key_from_text, mesh_key_text
from pmesh.home_paths import MESH_KEY_NAME
from tests.e2e.harness import Fleet, Running, StartedAgent
from tools.lab.net import LabHost, NetLab

pytestmark = pytest.mark.netns

CODE = r"pmesh join (\d+-\w+-\w+)"


def arguments() -> Iterator[str]:
    """What the process list shows of every process now."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            yield " ".join(process.cmdline())


def invite(fleet: Fleet, agent: StartedAgent) -> tuple[Running, str]:
    """`pmesh invite`, and the code that it shows."""
    showing = fleet.start_command("invite", home=agent.home)
    code = showing.await_line(CODE)[1]
    return showing, code


def join(fleet: Fleet, host: LabHost, *words: str, name: str) -> Running:
    return fleet.start_command("join", *words, home=fleet.home(name), host=host, PMESH_NAME=name)


def files_with(folder: Path, secrets: list[bytes]) -> list[Path]:
    """The files that hold a secret; agents replace theirs meanwhile."""
    found = list[Path]()
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and any(secret in path.read_bytes() for secret in secrets):
                found.append(path)
    return found


@pytest.mark.slow  # in one process: tests/invites
def test_a_bare_machine_joins_by_a_code_and_the_key_is_seen_nowhere(
    fleet: Fleet, make_lab: Callable[[int], NetLab]
) -> None:
    one, two, three = make_lab(3).hosts
    first = fleet.start_agent("mac-1", host=one, mesh_key="")
    first.await_status(lambda _: True)
    stranger = fleet.start_agent("mac-3", host=three)
    stranger.await_status(lambda _: True)
    seen: list[str] = []

    showing, code = invite(fleet, first)
    joining = join(fleet, two, code.upper().replace("-", " "), name="mac-2")
    while joining.alive:
        seen += arguments()
    joining.await_line("This machine has the mesh key of mac-1, in .*/mac-2/mesh_key")
    joining.await_line("^Type next: pmesh up$")
    showing.await_line("mac-2 has joined: it is here as soon as 'pmesh up' runs there")
    joining.await_end()
    showing.await_end()
    second = fleet.start_agent("mac-2", host=two, mesh_key="")
    fleet.await_view(first, second)
    first.process.await_line(r"mac-2 \(\w{8}\) at [0-9a-f.:]+ has the mesh key")
    seen += arguments()

    path = fleet.home("mac-2") / MESH_KEY_NAME
    assert path.read_bytes() == (fleet.home("mac-1") / MESH_KEY_NAME).read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text().strip()
    key = mesh_key_from_text(text)
    secrets = [text.encode(), key, key.hex().encode()]
    said = [*seen, *(each.output for each in (showing, joining, first.process, second.process))]
    assert [each for each in said if any(secret in each.encode() for secret in secrets)] == []
    assert {path.parent.name for path in files_with(fleet.home("mac-1").parent, secrets)} == {
        "mac-1",
        "mac-2",
    }
    assert mesh_key_text(key) == text


@pytest.mark.slow  # in one process: tests/invites
def test_join_up_starts_the_agent_and_a_second_join_says_that_it_is_a_member(
    fleet: Fleet, make_lab: Callable[[int], NetLab]
) -> None:
    one, two = make_lab(2).hosts
    first = fleet.start_agent("mac-1", host=one)
    first.await_status(lambda _: True)
    showing, code = invite(fleet, first)
    joining = join(fleet, two, code, "--up", name="mac-2")
    joining.await_line("The agent is running")
    try:
        showing.await_end()
        first.process.await_line("^mac-2 joined")
        showing, code = invite(fleet, first)
        again = join(fleet, two, code, name="mac-2")
        again.await_line("this machine is already a member of the mesh of mac-1")
        again.await_end()
        assert showing.alive  # the code is still good
    finally:
        fleet.pmesh("down", home=fleet.home("mac-2"))


@pytest.mark.slow  # in one process: tests/invites
def test_a_wrong_code_is_void_for_both_and_says_so(
    fleet: Fleet, make_lab: Callable[[int], NetLab]
) -> None:
    one, two = make_lab(2).hosts
    first = fleet.start_agent("mac-1", host=one)
    first.await_status(lambda _: True)
    showing, code = invite(fleet, first)
    number = code.partition("-")[0]
    other = "zebra-zoo" if not code.endswith("zebra-zoo") else "zoo-zebra"

    wrong = join(fleet, two, f"{number}-{other}", name="mac-2")
    wrong.await_line("UsageError: this is not the code that mac-1 shows; .* 'pmesh invite'")
    wrong.await_end(code=1)
    showing.await_line(r"somebody tried a wrong code: mac-2 at [0-9a-f.:]+\. If that was you")
    showing.await_end(code=1)
    right = join(fleet, two, code, "--peer", one.ipv4, name="mac-2")
    right.await_line("UsageError: mac-1 shows no such code now")
    right.await_end(code=1)
    assert not (fleet.home("mac-2") / MESH_KEY_NAME).exists()


@pytest.mark.slow  # in one process: tests/invites
def test_a_machine_of_another_mesh_is_refused_and_told_what_to_type(
    fleet: Fleet, make_lab: Callable[[int], NetLab]
) -> None:
    one, two = make_lab(2).hosts
    first = fleet.start_agent("mac-1", host=one)
    first.await_status(lambda _: True)
    assert fleet.pmesh("key", "new", home=fleet.home("mac-2")).returncode == 0
    before = (fleet.home("mac-2") / MESH_KEY_NAME).read_bytes()
    showing, code = invite(fleet, first)

    refused = join(fleet, two, code, name="mac-2")
    told = refused.await_line(
        "KeyFileError: this machine holds the key of another mesh .* 'pmesh (join --replace)'"
    )
    refused.await_end(code=1)
    assert (fleet.home("mac-2") / MESH_KEY_NAME).read_bytes() == before
    option = told[1].split()[1]
    join(fleet, two, code, option, name="mac-2").await_end()  # the code was not used up
    showing.await_end()
    assert (fleet.home("mac-2") / f"{MESH_KEY_NAME}.replaced").read_bytes() == before
    assert (fleet.home("mac-2") / MESH_KEY_NAME).read_bytes() != before


@pytest.mark.slow  # it looks for 10 s
def test_without_multicast_the_address_is_named(
    fleet: Fleet, make_lab: Callable[[int], NetLab]
) -> None:
    one, two = make_lab(2).hosts
    first = fleet.start_agent("mac-1", "--no-mdns", host=one)
    first.await_status(lambda _: True)
    showing, code = invite(fleet, first)

    lost = join(fleet, two, code, name="mac-2")
    lost.await_line(
        "PeerUnreachable: no machine that runs pmesh was found in 10 s: check that both"
    )
    lost.await_end(code=1)
    assert re.search("same network.*firewall.*--peer HOST:PORT", lost.output)
    joining = join(fleet, two, code, "--peer", one.ipv4, name="mac-2")
    joining.await_line(f"^Type next: pmesh up --peer {one.ipv4}:24160$")
    joining.await_end()
    showing.await_end()


@pytest.mark.slow  # likewise
def test_ctrl_c_withdraws_the_code(fleet: Fleet, make_lab: Callable[[int], NetLab]) -> None:
    one, two = make_lab(2).hosts
    first = fleet.start_agent("mac-1", host=one)
    first.await_status(lambda _: True)
    showing, code = invite(fleet, first)
    showing.send_signal(signal.SIGINT)
    showing.await_line("the code is withdrawn")
    showing.await_end(code=130)

    # By its address: without, it looks for 10 s for who announces the number.
    late = join(fleet, two, code, "--peer", one.ipv4, name="mac-2")
    late.await_line("mac-1 shows no such code now")
    late.await_end(code=1)


@pytest.mark.slow  # in one process: tests/invites
def test_a_fourth_code_in_an_hour_is_refused_whoever_asks(fleet: Fleet) -> None:
    first = fleet.start_agent("mac-1", "--no-mdns")
    first.await_status(lambda _: True)
    for _ in range(3):
        showing, _ = invite(fleet, first)
        showing.send_signal(signal.SIGINT)
        showing.await_end(code=130)
    refused = fleet.pmesh("invite", home=first.home)
    assert refused.returncode == 1
    assert re.match("UsageError: 3 codes of the last hour let nobody in.* wait 60", refused.stderr)
