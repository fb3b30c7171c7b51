"""`pmesh status` and `pmesh down`, against an agent that answers.

The status as a person reads it.

The picture of the ring.
"""

import io
import json
import time
from itertools import permutations
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType

from pmesh.agent.schema import (
    ComparisonStatus,
    EdgeStatus,
    JobStatus,
    NewcomerStatus,
    PathStatus,
    PathUse,
    PeerStatus,
    RankStatus,
    Status,
)
from pmesh.cli.app import run
from pmesh.cli.ring import RingNode, draw_ring
from pmesh.cli.sentences import job_line, speed_text
from pmesh.cli.status import Cropped, render_status
from pmesh.cli.status_all import render_all
from pmesh.core.jobs.reports import NotFinite
from pmesh.terminal.sizes import bytes_text
from tests.worlds.fake_status_agent import IDS, MINIMAL, NAMES, SNAPSHOT, agent_at, answer_well
from tests.worlds.faults import Faults


def shown(status: Status, *, width: int = 120) -> str:
    """All of it, as `pmesh status --all` prints it."""
    return drawn(render_all(status, width=width), width=width)


def first_screen(status: Status) -> list[str]:
    """The lines of `pmesh status` in a terminal of 80 columns."""
    return [line.rstrip() for line in drawn(render_status(status), width=80).splitlines()]


def drawn(picture: RenderableType, *, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(picture)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def job_of(*own_percents: int | None) -> JobStatus:
    """A job that runs, with ranks that spend so much of their time outside calls."""
    ranks = tuple(
        RankStatus(
            rank=rank,
            trainer=rank,
            node=node,
            name=name,
            started=41,
            completed=40,
            step=20,
            own_percent=own,
        )
        for rank, (node, name, own) in enumerate(zip(IDS, NAMES, own_percents, strict=False))
    )
    return JobStatus(
        name="digits",
        state="running",
        wait_for=None,
        ranks=ranks,
        newcomers=(),
        step=20,
        steps_per_s=3.91,
        ops_per_s=7.8,
    )


def way(name: str, kind: str, use: PathUse, mbit_s: int) -> PathStatus:
    return PathStatus(interface=name, remote=name, kind=kind, use=use, mbit_s=mbit_s, rtt_ms=12.34)


WAYS = (
    way("bridge0", "thunderbolt", "in use", 18_400),
    way("en0", "wifi", "standby", 310),
)


def three_machines(job: JobStatus) -> Status:
    """A mesh in which nothing is wrong; each machine has three addresses and two ways to it."""
    members = tuple(
        msgspec.structs.replace(
            m,
            addresses=(f"192.168.178.{n}:24160", f"[2001:db8:77::{n}]:24160", "[fe80::1]:24160"),
            paths=WAYS if m.health != "self" else (),
            loss_percent=0.0,
            silence_s=0.1,
        )
        for n, m in enumerate(SNAPSHOT.view.members, 101)
    )
    view = msgspec.structs.replace(SNAPSHOT.view, members=members)
    return msgspec.structs.replace(SNAPSHOT, view=view, jobs=(job,), peers=(), held_off=())


def test_three_machines_with_a_job_fit_the_smallest_terminal() -> None:
    lines = first_screen(three_machines(job_of(96, 20, 21)))
    assert len(lines) < 24, "the prompt has a line, too"
    assert max(map(cell_len, lines)) <= 80
    assert any("thunderbolt bridge0" in line and "192.168.178.102:24160" in line for line in lines)
    assert not any("standby" in line or "fe80" in line for line in lines)


def test_the_first_screen_says_how_fast_a_job_trains_and_whom_it_waits_for() -> None:
    lines = first_screen(three_machines(job_of(20, 21, 96)))
    (job,) = [n for n, line in enumerate(lines) if line.startswith("Job ")]
    expected = "trains with 3 ranks: step 20, 3.9 steps a second; slowest: studio"
    assert lines[job] == f"Job digits {expected}"
    assert lines[job + 4].split("%")[1].strip() == "the others wait for it in each step"
    assert job < min(n for n, line in enumerate(lines) if "192.168.178" in line)


def compared(*others: int, differing: int, mended: bool = False) -> str:
    found = ComparisonStatus(
        digest="3f2a9c1d0b7e" + 20 * "0",
        step=20,
        op=40,
        ranks=12,
        differing=differing,
        others=others,
        mended=mended,
    )
    return job_line(msgspec.structs.replace(job_of(20, 21), comparison=found)).plain


def test_a_job_says_whether_all_ranks_have_the_same_state() -> None:
    on_all = "3.9 steps a second; state 3f2a9c1d0b7e on all"
    assert compared(differing=0).endswith(on_all)
    assert compared(1, differing=1, mended=True).endswith(on_all)
    assert compared(7, differing=1).endswith(on_all), "the rank that differed has left"
    text = "; another state than the others: "
    assert compared(1, differing=1).endswith(f"{text}rank 1 ({NAMES[1]})")
    assert compared(1, 7, 8, differing=5).endswith(f"{text}rank 1 ({NAMES[1]}), 2 more")


def test_a_rank_shows_its_share_where_rows_are_dealt_by_speed() -> None:
    job = job_of(60, 61)
    shares = [msgspec.structs.replace(rank, share_percent=75) for rank in job.ranks]
    dealt = msgspec.structs.replace(job, ranks=(shares[0], job.ranks[1]))
    assert (
        sum("takes 75 % of each batch" in line for line in first_screen(three_machines(dealt))) == 1
    )


def test_a_terminal_that_has_room_shows_the_loss_of_each_rank_that_reports_one() -> None:
    job = job_of(60, 61, 62)
    reports: tuple[dict[str, float | NotFinite], ...] = ({"loss": 0.031239}, {"loss": "nan"}, {})
    both = zip(job.ranks, reports, strict=True)
    ranks = tuple(msgspec.structs.replace(rank, reports=each) for rank, each in both)
    status = three_machines(msgspec.structs.replace(job, ranks=ranks))
    lines = first_screen(status)
    header = next(n for n, line in enumerate(lines) if line.startswith("rank"))
    assert lines[header].split() == ["rank", "machine", "step", "loss", "computes"]
    cells = [line.split() for line in lines[header + 1 : header + 4]]
    assert [line[3] for line in cells] == ["0.03124", "nan", "62"]
    narrow = drawn(render_status(status, width=60), width=60)
    assert "0.03124" not in narrow
    assert "loss" not in "".join(first_screen(three_machines(job)))


@pytest.mark.parametrize("shares", [(96, 97, 90), (96, None, 20), (50,)])
def test_nobody_is_called_slow_who_may_not_be(shares: tuple[int | None, ...]) -> None:
    screen = "".join(first_screen(three_machines(job_of(*shares))))
    assert "slowest" not in screen
    assert "wait for it" not in screen


def test_a_job_that_never_syncs_is_counted_in_ops() -> None:
    job = msgspec.structs.replace(job_of(50, 50), step=0, steps_per_s=None)
    assert "Job digits trains with 2 ranks: op 41, 7.8 ops a second" in first_screen(
        three_machines(job)
    )


def test_the_first_screen_says_why_a_job_stands_still_and_which_machine_is_silent() -> None:
    job = msgspec.structs.replace(job_of(50), state="no_quorum", reason="no majority")
    status = three_machines(job)
    one, two, three = status.view.members
    two = msgspec.structs.replace(two, health="suspect")
    view = msgspec.structs.replace(status.view, members=(one, two, three))
    lines = first_screen(msgspec.structs.replace(status, view=view))
    assert lines[0] == "mac-1 sees 3 machines: mac-2 is silent; ★ mac-1 leads"
    assert "Job digits stands still with 1 rank: no majority" in lines


def test_a_job_that_waits_says_for_how_many() -> None:
    newcomers = (NewcomerStatus(node=IDS[0], name="mac-1"),)
    job = JobStatus(name="x", state="waiting", wait_for=2, ranks=(), newcomers=newcomers)
    assert "Job x waits to begin: 1 of 2 trainers are here" in first_screen(three_machines(job))


def test_a_screen_that_is_too_high_says_how_much_is_missing() -> None:
    picture = render_status(three_machines(job_of(96, 20, 21)))
    console = Console(file=io.StringIO(), width=80, height=12, color_system=None)
    console.print(Cropped(picture))
    assert isinstance(console.file, io.StringIO)
    whole = [line.rstrip() for line in drawn(picture, width=80).splitlines()]
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines[:11] == whole[:11]
    assert lines[11:] == [f"… {len(whole) - 11} more lines: pmesh status"]


@pytest.mark.parametrize(
    ("per_s", "text"), [(0.0, "0"), (0.0123, "0.012"), (3.91, "3.9"), (412.3, "412")]
)
def test_a_speed_has_the_digits_that_count(per_s: float, text: str) -> None:
    assert speed_text(per_s) == text


@pytest.mark.parametrize(
    "words",
    [
        "mac-1 aaaaaaaa · 10.0.0.1:24160 · pid 4242, up 62 s · pmesh 0.1.0 · compression auto",
        "compression in�t8: why",
        "View 7, 3 in the ring",
        "╭─▶ ● mac-1 ★ ──▶ ● mac-2",
        "0.50 ± 0.0 ms",
        "→ mac-2          en0 → en7      wired   ! (100)   0.25 ± 0.0 ms   in use",
        "en1 → en�1     wifi              4.25 ms         standby",
        "? → 10.0.0.9                                     silent",
        "← studio         en0 → en7",
        "mac-2 → studio                                    0.50 ms",
        "! mac-2: en0 here runs at 100 Mbit/s",
        "2.1 %",
        "the link to mac-2 had to send 2.1 % of its packets again and was silent for 1.6 s lately",
        "the link to studio had to send 4.3 % of its packets again; training waits",
        "a�ir was lost 3 times lately; it is let back in in 8 s",
        "en0",
        "other mesh key",
        "holds another mesh key",
        "waiting for 3",
        "below min ranks",
        "1 mac-2 stopped",
        "stu�dio enters at the next sync",
        "mac-1 waits",
        "it has 2 of the 3",
        "rank 1 (studio) is lost: silent",
        "data 2.5 MB sent, 0 B received; control 1.5 kB sent, 999 B received",
        "loop lag 1.2 ms; 9 connections came, 6 turned away, 1 pending",
        "also turned away: 2 links of members that broke the protocol",
    ],
)
def test_the_picture_shows(words: str) -> None:
    assert words in shown(SNAPSHOT)


def test_what_a_stranger_calls_itself_does_not_steer_the_terminal() -> None:
    for screen in (shown(SNAPSHOT), "\n".join(first_screen(SNAPSHOT))):
        assert "\x1b" not in screen
        assert "next�[2J-door" in screen


def test_the_first_screen_says_who_is_not_linked_and_why() -> None:
    nobody = PeerStatus(id=None, name=None, state="connecting", addresses=("10.0.0.3:24160",))
    lines = first_screen(msgspec.structs.replace(SNAPSHOT, peers=(*SNAPSHOT.peers, nobody)))
    assert "Not linked: next�[2J-door: holds another mesh key" in lines
    assert "Not linked: 10.0.0.3:24160: connecting" in lines


def test_a_quiet_mesh_has_no_empty_tables() -> None:
    assert "Jobs" not in shown(MINIMAL)
    assert "Not linked" not in shown(MINIMAL)


def test_of_two_machines_each_is_before_and_after_the_other() -> None:
    one, two = SNAPSHOT.view.members[:2]
    edges = tuple(EdgeStatus(sender=a, receiver=b, rtt_ms=1.0) for a, b in permutations(IDS[:2]))
    view = msgspec.structs.replace(SNAPSHOT.view, members=(one, two), edges=edges)
    assert "⇄ mac-2" in shown(msgspec.structs.replace(SNAPSHOT, view=view))


def test_a_measured_bandwidth_is_shown_for_each_path_and_only_else_what_its_interfaces_claim() -> (
    None
):
    one, two, three = SNAPSHOT.view.members
    paths = [msgspec.structs.replace(path, mbit_s=n) for n, path in enumerate(two.paths, 93)]
    two = msgspec.structs.replace(two, paths=tuple(paths))
    edges = [msgspec.structs.replace(edge, mbit_s=941) for edge in SNAPSHOT.view.edges]
    view = msgspec.structs.replace(SNAPSHOT.view, members=(one, two, three), edges=tuple(edges))
    lines = shown(msgspec.structs.replace(SNAPSHOT, view=view)).splitlines()
    (path,) = [line.split() for line in lines if "→ mac-2 " in line and "en0" in line]
    assert path[6:9] == ["!", "93", "0.25"]
    assert any("wifi    94 " in line for line in lines)
    (edge,) = [line.split() for line in lines if "mac-2 → studio" in line]
    assert edge[3] == "941"


@pytest.mark.parametrize("kind", ["thunderbolt", "wired"])
def test_paths_fit_a_terminal_of_80_columns(kind: str) -> None:
    one, two, _ = SNAPSHOT.view.members
    path = PathStatus(
        interface="bridge0",
        remote="bridge0",
        kind=kind,
        use="in use",
        speed_mbit_s=40_000,
        mbit_s=9_400,
        slow="of a cable",
    )
    two = msgspec.structs.replace(two, name="mac-studio", paths=(path,), rtt_ms=12.34)
    view = msgspec.structs.replace(SNAPSHOT.view, members=(one, two), edges=SNAPSHOT.view.edges[:1])
    lines = shown(msgspec.structs.replace(SNAPSHOT, view=view), width=80).splitlines()
    (row,) = [line.split() for line in lines if "! 9400 " in line]
    assert row[:4] == ["→", "mac-studio", "bridge0", kind]


def test_a_good_link_is_not_called_bad() -> None:
    good = (
        msgspec.structs.replace(m, loss_percent=0.94, silence_s=0.4) for m in SNAPSHOT.view.members
    )
    view = msgspec.structs.replace(SNAPSHOT.view, members=tuple(good))
    screen = shown(msgspec.structs.replace(SNAPSHOT, view=view))
    assert "0.9 %" in screen
    assert "training waits" not in screen


def test_an_agent_without_its_native_library_says_why() -> None:
    node = msgspec.structs.replace(SNAPSHOT.node, without_native="no C compiler was found")
    screen = " ".join(shown(msgspec.structs.replace(SNAPSHOT, node=node)).split())
    assert "! this agent works without its native library, which is faster: no C" in screen
    assert "native" not in shown(SNAPSHOT)


def test_an_agent_that_encrypts_slowly_says_why() -> None:
    node = msgspec.structs.replace(SNAPSHOT.node, slow_encryption="pyaegis is missing")
    screen = " ".join(shown(msgspec.structs.replace(SNAPSHOT, node=node)).split())
    assert "! this agent encrypts lanes without AES instructions" in screen
    assert "hundreds of times slower: pyaegis is missing" in screen
    assert "encrypts" not in shown(SNAPSHOT)


def test_machines_of_one_name_are_told_apart_with_a_hint_at_what_names_them() -> None:
    one, two, three = SNAPSHOT.view.members
    alike = (msgspec.structs.replace(m, name=f"mac ({m.id[:4]})") for m in (one, two))
    view = msgspec.structs.replace(SNAPSHOT.view, members=(*alike, three))
    screen = shown(msgspec.structs.replace(SNAPSHOT, view=view))
    assert "● mac (aaaa) ★ ──▶ ● mac (bbbb)" in screen
    assert "2 machines are called 'mac'; start one with 'pmesh up --name OTHER'" in screen
    assert "are called" not in shown(SNAPSHOT)


def test_a_machine_that_has_the_name_of_another_gets_a_hint_at_what_to_type() -> None:
    one, *others = SNAPSHOT.view.members
    other = msgspec.structs.replace(one, name=f"my mac ({one.id[:4]})")
    view = msgspec.structs.replace(SNAPSHOT.view, members=(other, *others))
    screen = " ".join(shown(msgspec.structs.replace(SNAPSHOT, view=view)).split())
    assert "another machine had the name 'my mac' before; if it is the same one," in screen
    assert "type: pmesh forget 'my mac'" in screen


def test_no_number_of_bytes_lacks_a_unit() -> None:
    assert bytes_text(10**21) == "1000000.0 PB"


def test_three_members_stand_clockwise() -> None:
    nodes = [RingNode("mac-1", "self", leader=True, here=True), RingNode("mac-2")]
    nodes.append(RingNode("studio", "suspect"))
    assert draw_ring(nodes).plain.splitlines() == [
        "╭─▶ ● mac-1 ★ ──▶ ● mac-2   ──╮",
        "│                             │",
        "╰── ○ studio  ◀───────────────╯",
    ]


def test_one_member_is_alone() -> None:
    assert draw_ring([RingNode("mac-1", leader=True)]).plain == "● mac-1 ★ alone"


@given(
    names=st.lists(st.text(min_size=1, max_size=63), min_size=2, max_size=8),
    width=st.integers(64, 200),
)
def test_any_ring_is_a_rectangle_that_fits(names: list[str], width: int) -> None:
    lines = draw_ring([RingNode(name) for name in names], width=width).plain.split("\n")
    assert len(lines) == 3
    assert len({cell_len(line) for line in lines}) == 1
    assert cell_len(lines[0]) <= width


@pytest.mark.parametrize("size", range(2, 9))
def test_the_light_visits_every_edge_in_turn(size: int) -> None:
    def lit(beat: int) -> frozenset[tuple[int, int]]:
        picture = draw_ring([RingNode(f"n{i}") for i in range(size)], beat=beat)
        return frozenset((s.start, s.end) for s in picture.spans if s.style == "bold cyan")

    seen = [lit(beat) for beat in range(size)]
    assert len(set(seen)) == size
    assert all(seen)
    assert lit(size) == lit(0)


@pytest.fixture
def slept(faults: Faults) -> list[float]:
    """The waits between two pictures; they take no time."""
    waits: list[float] = []
    faults.pretend(time, "sleep", waits.append)
    return waits


def test_status_shows_the_ring(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with agent_at(socket, answer_well):
        assert run(["status"]) == 0
    assert "● mac-1 ★" in capsys.readouterr().out


def test_a_pipe_gets_no_lines_filled_with_spaces(
    socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with agent_at(socket, answer_well):
        assert run(["status"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) < 200


def test_status_json_is_the_documented_picture(
    socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with agent_at(socket, answer_well):
        assert run(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["node"]["id"] == SNAPSHOT.node.id


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_watching_goes_on_until_the_agent_has_gone(
    socket: Path, slept: list[float], form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with agent_at(socket, answer_well, answer_well):
        assert run(["status", "--watch", *form]) == 1
    assert slept == [1.0, 1.0]
    shown = capsys.readouterr()
    assert shown.err.startswith("AgentNotRunning: ")
    assert "mac-1" in shown.out


def test_watching_on_a_terminal_draws_over_what_stands_there(
    socket: Path,
    slept: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    with agent_at(socket, answer_well, answer_well):
        assert run(["status", "--watch"]) == 1
    assert len(slept) == 2
    shown = capsys.readouterr().out
    assert shown.count("sees 3 machines") == 2
    assert "\x1b[?1049h" in shown, "on the alternate screen"


@pytest.mark.parametrize("form", [[], ["--json"], ["--all"]])
def test_watching_ends_by_ctrl_c_which_is_no_failure(
    form: list[str],
    socket: Path,
    faults: Faults,
    capsys: pytest.CaptureFixture[str],
) -> None:
    faults.fail(time, "sleep", KeyboardInterrupt())
    with agent_at(socket, answer_well):
        assert run(["status", "--watch", *form]) == 0
    assert not capsys.readouterr().err


def test_down_says_who_has_left(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with agent_at(socket, answer_well):
        assert run(["down"]) == 0
    assert f"pid {2**22 + 1}" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["down"]])
def test_without_an_agent_the_socket_and_the_command_are_named(
    socket: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"AgentNotRunning: no agent listens at {socket}")
    assert "'pmesh up'" in error
    assert error.count("\n") == 1
