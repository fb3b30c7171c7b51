"""What `pmesh top` shows of a status, of how losses went and of the last events."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.cells import cached_cell_len, cell_len

from pmesh.agent.events import Event
from pmesh.agent.schema import EdgeStatus, JobStatus, MemberStatus, RankStatus, Status
from pmesh.cli.sentences import Split, explain_pace, split_of
from pmesh.cli.top.history import Losses, sparkline
from pmesh.cli.top.screen import Shown, bar, lines_of
from tests.worlds.fake_status_agent import PATHS, SNAPSHOT, make_chronicle

SPEEDS = (18_400, 940, 54, 310, 9_400, 2_500, 10_000, 1_000)


def ranks_of(*own: int | None) -> tuple[RankStatus, ...]:
    return tuple(
        RankStatus(
            rank=rank,
            trainer=rank,
            node=id_of(rank),
            name=f"mac-{rank + 1}",
            started=5,
            completed=5,
            step=812,
            own_percent=percent,
            share_percent=12,
            reports={"loss": 0.25 * (rank + 1)},
        )
        for rank, percent in enumerate(own)
    )


def id_of(number: int) -> str:
    return chr(ord("a") + number) * 52


def job_of(*own: int | None) -> JobStatus:
    return JobStatus(
        name="digits",
        state="running",
        wait_for=None,
        ranks=ranks_of(*own),
        newcomers=(),
        step=812,
        steps_per_s=9.4,
    )


def mesh_of(count: int, *jobs: JobStatus) -> Status:
    """Machines that are well, each busier than the one before."""
    members = tuple(
        MemberStatus(
            id=id_of(number),
            name=f"mac-{number + 1}",
            rank=number,
            health="healthy" if number else "self",
            rtt_ms=0.25 if number else None,
            addresses=("10.0.0.1:24160",),
            cpu_percent=10 * number,
            memory_percent=90 + number,
        )
        for number in range(count)
    )
    edges = tuple(
        EdgeStatus(
            sender=id_of(number),
            receiver=id_of((number + 1) % count),
            rtt_ms=0.2,
            mbit_s=SPEEDS[number],
        )
        for number in range(count)
    )
    view = replace(SNAPSHOT.view, members=members, edges=edges, leader=id_of(0))
    return replace(SNAPSHOT, view=view, jobs=jobs, peers=(), held_off=())


def events_of(count: int) -> tuple[Event, ...]:
    log = make_chronicle()
    for number in range(count - 1):
        log.note("peer joined", f"mac-{number} has joined")
    return log.since(-1).events


def seen_of(status: Status, *, events: int = 5, trouble: str = "") -> Shown:
    losses = Losses()
    for step in range(100):
        losses.note(
            [replace(job, step=step, ranks=reporting(job, 100 - step)) for job in status.jobs]
        )
    return Shown(status=status, losses=losses, events=events_of(events), trouble=trouble)


def reporting(job: JobStatus, loss: float) -> tuple[RankStatus, ...]:
    return tuple(replace(rank, reports={"loss": float(loss)}) for rank in job.ranks)


def shown(seen: Shown, *, width: int = 80, height: int | None = 24) -> list[str]:
    return [line.plain for line in lines_of(seen, width=width, height=height)]


def test_three_machines_that_train_on_a_terminal_of_80_columns() -> None:
    seen = seen_of(mesh_of(3, job_of(20, 96, 30)))
    assert shown(seen) == [
        "mac-1 sees 3 machines: all are well; ★ mac-1 leads · q ends",
        "",
        "╭─▶ ● mac-1 ★ ─18.4─▶ ● mac-2   ──╮",
        "│ 0.05         Gbit/s        0.94 │",
        "╰── ● mac-3   ◀───────────────────╯",
        "",
        "Job digits: step 812, 9.4 steps a second; loss 0.5",
        sparkline(seen.losses.of(seen.status.jobs[0]), 80),
        "slowest: mac-2 computes 96 %, others wait 76 %; it takes 12 % of the rows",
        "rank  machine  loss  rows  █comp ▒wait ░net  %",
        "0     mac-1    0.25  12 %  ███▒▒▒▒▒▒▒▒▒▒▒▒░  20/76/4",
        "1     mac-2    0.5   12 %  ███████████████░  96/0/4",
        "2     mac-3    0.75  12 %  █████▒▒▒▒▒▒▒▒▒▒░  30/66/4",
        "",
        "   machine  cpu    memory  round trip",
        "●  mac-1 ★    0 %   90 %   here",
        "●  mac-2     10 %   91 %   0.25 ms",
        "●  mac-3     20 %   92 %   0.25 ms",
        "",
        *[line_of(event) for event in events_of(5)],
    ]


def line_of(event: Event) -> str:
    return f"{event.time.astimezone():%H:%M:%S}  {event.kind}  {event.text}"


def test_eight_machines_that_train_fit_60_columns_and_24_lines() -> None:
    lines = shown(seen_of(mesh_of(8, job_of(96, 20, 30, 40, 50, 60, 10, 0))), width=60)
    assert len(lines) == 24
    assert "● mac-1 ★ ─" not in "".join(lines)
    assert "→ Gbit/s" in lines[14]
    assert [line.split()[-1] for line in lines[15:23]] == [
        *("18.4", "0.94", "0.05", "0.31", "9.4", "2.5", "10.0", "1.0")
    ]
    assert lines[-1].endswith("mac-3 has joined")


@given(
    width=st.integers(20, 200),
    height=st.integers(1, 60),
    count=st.integers(1, 8),
    jobs=st.integers(0, 3),
    events=st.integers(1, 9),
)
def test_every_screen_fits_its_terminal(
    width: int, height: int, count: int, jobs: int, events: int
) -> None:
    job = job_of(*[10 * rank for rank in range(count)])
    lines = shown(
        seen_of(
            mesh_of(count, *[replace(job, name=f"job-{n}") for n in range(jobs)]), events=events
        ),
        width=width,
        height=height,
    )
    assert 0 < len(lines) <= height
    assert max(map(cell_len, lines)) <= min(width, 120)


def test_a_terminal_that_is_too_low_says_how_much_more_there_is() -> None:
    status = mesh_of(3, job_of(20, 96, 30))
    assert shown(seen_of(status), height=6)[-1] == "… 7 more lines: pmesh status"


def test_without_a_terminal_all_of_it_is_shown_and_the_last_three_events() -> None:
    lines = shown(seen_of(mesh_of(8, job_of(*range(8))), events=9), width=10_000, height=None)
    assert "q ends" not in lines[0]
    assert [line.partition("joined  ")[2] for line in lines[-4:]] == [
        *("", "mac-5 has joined", "mac-6 has joined", "mac-7 has joined")
    ]


def test_a_mesh_at_rest_has_no_jobs_and_unknown_speeds_stand_nowhere() -> None:
    status = mesh_of(2)
    edges = tuple(replace(edge, mbit_s=None) for edge in status.view.edges)
    members = tuple(
        replace(member, cpu_percent=None, memory_percent=None) for member in status.view.members
    )
    quiet = replace(status, view=replace(status.view, edges=edges, members=members))
    assert shown(seen_of(quiet), height=None)[:-4] == [
        "mac-1 sees 2 machines: all are well; ★ mac-1 leads",
        "",
        "╭─▶ ● mac-1 ★ ──╮",
        "│               │",
        "╰── ● mac-2   ◀─╯",
        "",
        "   machine  round trip",
        "●  mac-1 ★  here",
        "●  mac-2    0.25 ms",
    ]


def test_jobs_that_do_not_train_say_why() -> None:
    lines = shown(seen_of(replace(mesh_of(3), jobs=SNAPSHOT.jobs)), height=None)
    first = lines.index("Job digits stands still with 2 ranks: it has 2 of the 3")
    assert lines[first + 1 : first + 5] == [
        "rank  machine  █comp ▒wait ░net  %",
        "0     mac-1",
        "1     mac-2                      stopped",
        "      stu�dio  enters soon",
    ]
    assert "Job late waits to begin: 1 of 3 trainers are here" in lines


def test_a_loss_that_is_no_number_is_said_to_be_none() -> None:
    job = job_of(50, 50)
    ranks = (replace(job.ranks[0], reports={"loss": "nan"}), replace(job.ranks[1], reports={}))
    lines = shown(Shown(status=mesh_of(2, replace(job, ranks=ranks)), losses=Losses(), events=()))
    assert "Job digits: step 812, 9.4 steps a second; loss nan" in lines
    assert next(line for line in lines if line.startswith("0 ")).split()[2] == "nan"


def test_a_job_without_reports_has_no_loss() -> None:
    job = job_of(50, 50)
    ranks = tuple(replace(rank, reports={}, share_percent=None) for rank in job.ranks)
    lines = shown(Shown(status=mesh_of(2, replace(job, ranks=ranks)), losses=Losses(), events=()))
    assert "Job digits: step 812, 9.4 steps a second" in lines
    assert "rank  machine  █comp ▒wait ░net  %" in lines


def test_an_agent_that_has_ended_leaves_the_last_screen_and_says_so() -> None:
    lines = shown(seen_of(mesh_of(2), trouble="the agent has\x1b ended"))
    assert lines[0] == "the agent has� ended · q ends"
    assert any("mac-2" in line for line in lines)


def test_long_names_are_cut_where_there_is_no_room() -> None:
    job, status = job_of(50, 50), mesh_of(2)
    ranks = tuple(replace(rank, name="n" * 40) for rank in job.ranks)
    lines = shown(seen_of(replace(status, jobs=(replace(job, ranks=ranks),))), width=60)
    (first,) = [line for line in lines if line.startswith("0 ")]
    assert "nnn…" in first
    assert first.endswith("50/0/50")


def test_what_is_wrong_stands_below_the_machines() -> None:
    status = mesh_of(3)
    members = tuple(replace(member, paths=PATHS[:1]) for member in status.view.members)
    lines = shown(seen_of(replace(status, view=replace(status.view, members=members))))
    assert [line for line in lines if line.startswith("! mac-2")] == [
        "! mac-2: en0 here runs at 100 Mbit/s"
    ]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ((96, 20), {0: Split(96, 0, 4), 1: Split(20, 76, 4)}),
        ((30,), {0: Split(30, 0, 70)}),
        ((96, None), {}),
        ((), {}),
    ],
)
def test_a_step_is_split_by_the_rank_that_computes_longest(
    own: tuple[int | None, ...], expected: dict[int, Split]
) -> None:
    assert split_of(ranks_of(*own)) == expected


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.integers(1, 30))
def test_a_split_is_a_whole_step_and_its_bar_has_all_cells(own: list[int], cells: int) -> None:
    for split in split_of(ranks_of(*own)).values():
        assert sum(split) == 100
        assert min(split) >= 0
        drawn = bar(split, cells)
        assert len(drawn) == cells
        assert [*drawn] == sorted(drawn, key="█▒░".index)


def explained(job: JobStatus, count: int = 3) -> str:
    return explain_pace(job, mesh_of(count, job))


def test_who_is_slowest_is_said_and_why() -> None:
    full = job_of(20, 30, 21, 22, 23, 24, 25, 96)
    assert explained(full, 8) == (
        "slowest: mac-8 computes 96 %, others wait 76 %; its memory is full (97 %); it takes 12 % "
        "of the rows"
    )
    even = replace(full, ranks=tuple(replace(r, share_percent=None) for r in full.ranks[:3]))
    assert explained(
        replace(even, ranks=(*even.ranks[:2], replace(even.ranks[2], own_percent=90)))
    ) == ("slowest: mac-3 computes 90 %, others wait 70 %")


def test_a_rank_on_a_machine_that_has_just_gone_may_be_the_slowest() -> None:
    assert explained(job_of(20, 21, 96), 2).startswith("slowest: mac-3 computes 96 %")


def test_a_stopped_process_is_why_the_others_wait() -> None:
    job = job_of(20, 96)
    stopped = (replace(job.ranks[0], stopped=True), job.ranks[1])
    assert explained(replace(job, ranks=stopped)) == (
        "the process of mac-1 is stopped: the others wait"
    )


def test_a_slow_network_is_said_with_the_slowest_edge_of_the_job() -> None:
    assert explained(job_of(30, 31, 32)) == (
        "the network takes 68 % of a step; slowest: mac-3 → mac-1, 0.05 Gbit/s"
    )
    job = job_of(30, 31)  # the third machine has no part in it
    assert explained(job) == "the network takes 69 % of a step; slowest: mac-1 → mac-2, 18.4 Gbit/s"
    status = mesh_of(3, job)
    unknown = replace(status.view, edges=tuple(replace(e, mbit_s=None) for e in status.view.edges))
    assert explain_pace(job, replace(status, view=unknown)) == "the network takes 69 % of a step"


@pytest.mark.parametrize("own", [(80, 81), (30,), (96, None), (None, None)])
def test_nothing_is_said_of_a_job_that_gets_on(own: tuple[int | None, ...]) -> None:
    assert explained(job_of(*own)) == ""


def test_only_a_job_that_trains_moves_the_light_of_the_ring() -> None:
    seen = seen_of(mesh_of(3))
    pictures = [lines_of(seen, width=80, height=24, beat=beat) for beat in (None, 0, 1, 2, 3)]
    styles = [[span.style for line in lines[2:5] for span in line.spans] for lines in pictures]
    assert not any("bold cyan" in map(str, each) for each in styles[:1])
    assert all("bold cyan" in map(str, each) for each in styles[1:])
    assert all(one != other for one, other in pairwise(styles))
    assert styles[1] == styles[4]


def test_numbers_of_screens_that_are_gone_are_not_kept() -> None:
    """Rich remembers how wide texts are, and each second has others."""
    status = mesh_of(3, job_of(80, 81))
    (job,) = status.jobs
    kept = list[int]()
    for step in range(100):
        lines_of(seen_of(replace(status, jobs=(replace(job, step=step),))), width=80, height=24)
        kept.append(cached_cell_len.cache_info().currsize)
    assert kept[-1] <= kept[0] + 5
