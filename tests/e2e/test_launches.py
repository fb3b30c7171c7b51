"""`pmesh run --on`: one command on the machines of a mesh, from one terminal."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from pmesh.launches.cli.launches import allow_run
from tests.e2e.harness import TIMEOUT_S, Fleet, Running, StartedAgent, allow_runs
from tools.lab.net import NetLab
from tools.lab.program import await_that

pytestmark = pytest.mark.slow

ENDS_S = 5.0
"""Within so long nothing may be left running, whatever has happened."""


def running(word: str) -> list[int]:
    """The processes whose command line has this word."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if word in (words := process.info["cmdline"] or ())
        and "pmesh.cli" not in words
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def ranks(word: str) -> list[int]:
    """Those of them that `pmesh run` has started: each leads a session."""
    return [pid for pid in running(word) if os.getsid(pid) == pid]


def test_a_script_trains_on_three_machines_from_one_terminal(
    fleet: Fleet, ring: list[StartedAgent], tmp_path: Path
) -> None:
    script = tmp_path / "line.py"
    script.write_text(
        "import numpy as np, pmesh\n"
        "with pmesh.connect() as mesh:\n"
        "    total = int(mesh.all_reduce(np.array(10**mesh.rank)))\n"
        "    print('sum', total, 'rank 0' * (mesh.rank == 0), flush=True)\n"
    )
    done = fleet.pmesh("run", "--on", "all", "--", str(script), home=ring[1].home)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        *("mac-1 | sum 111 ", "mac-2 | sum 111 rank 0", "mac-3 | sum 111 ")
    ]


def test_the_number_before_a_line_is_the_rank_that_its_script_has_just_then(
    fleet: Fleet, ring: list[StartedAgent], tmp_path: Path
) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, time, pmesh\n"
        "time.sleep(0.2 * (5 - int(os.environ['PMESH_PLACE'])))\n"  # the last one connects first
        "with pmesh.connect() as mesh:\n"
        "    mesh.sync(0)\n"
        "    print('began as', mesh.rank, flush=True)\n"
        "    mesh.barrier()\n"
        "    if mesh.rank == 2:\n"
        "        os._exit(3)\n"
        "    mesh.barrier()\n"
        "    print('goes on as', mesh.rank, flush=True)\n"
    )
    words = ("run", "--on", "all", "--per-node", "2", "--restarts", "0", "--", str(script))
    done = fleet.pmesh(*words, home=ring[0].home)
    began, went_on = (  # the lines of two machines come in any order
        [line.split(word) for line in done.stdout.splitlines() if word in line]
        for word in (" | began as ", " | goes on as ")
    )
    assert (len(began), len(went_on)) == (6, 5), done.stderr
    assert all(prefix.split()[1] == rank for prefix, rank in (*began, *went_on))
    assert {rank for _, rank in began} == set("012345")
    (lost,) = [name for name, rank in (p.split() for p, _ in began) if rank == "2"]
    assert f"pmesh: rank 2 on {lost} ended with exit code 3" in done.stderr


def test_a_machine_that_has_not_allowed_it_is_named_and_nothing_starts(
    fleet: Fleet, ring: list[StartedAgent], tmp_path: Path
) -> None:
    allow_run(ring[2].home, (), as_root=False, no=True)
    done = fleet.pmesh(
        "run", "--on", "all", "--", "touch", str(tmp_path / "ran"), home=ring[0].home
    )
    assert done.returncode == 1
    assert done.stderr == (
        "UsageError: mac-3: it does not run what others ask for; "
        "if it shall, type there: pmesh allow run\n"
    )
    assert not (tmp_path / "ran").exists()
    events = fleet.pmesh("events", home=ring[2].home).stdout
    assert "command refused" in events
    assert "mac-1 wanted to run here: touch" in events


def test_what_is_missing_on_one_machine_is_named_and_nothing_starts(
    fleet: Fleet, ring: list[StartedAgent], tmp_path: Path
) -> None:
    done = fleet.pmesh("run", "--on", "mac-1,mac-9", "--", "true", home=ring[0].home)
    assert "UsageError: no machine is called 'mac-9'; there are" in done.stderr
    done = fleet.pmesh(
        "run", "--on", "all", "--env", "LD_PRELOAD=x.so", "--", "true", home=ring[0].home
    )
    assert (done.returncode, done.stderr) == (
        2,
        (
            "ConfigError: --env: LD_PRELOAD may not be set: "
            "it changes which code the machine's own programs load\n"
        ),
    )
    done = fleet.pmesh(
        "run", "--on", "all", "--cwd", str(tmp_path / "nowhere"), "--", "true", home=ring[0].home
    )
    assert done.returncode == 1
    assert "mac-2: there is no directory" in done.stderr


def test_arguments_arrive_as_they_are_and_input_reaches_rank_0(
    fleet: Fleet, ring: list[StartedAgent]
) -> None:
    words = ["a b", "two\nlines", "$HOME", "; touch x", "'\""]
    show = "import sys; print(repr(sys.argv[1:]), repr(sys.stdin.read()))"
    done = fleet.pmesh(
        "run", "--on", "mac-1,mac-2", "--", "python3", "-c", show, *words,
        home=ring[0].home, piped="typed\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = sorted(line.partition("| ")[2] for line in done.stdout.splitlines())
    assert lines == [f"{words!r} ''", f"{words!r} {'typed' + chr(10)!r}"]
    assert "two\\nlines" in fleet.pmesh("events", home=ring[1].home).stdout


def test_the_first_failure_is_the_exit_code(fleet: Fleet, ring: list[StartedAgent]) -> None:
    script = 'if [ "$RANK" = 1 ]; then echo bad >&2; exit 7; fi; sleep 600'
    done = fleet.pmesh(
        "run", "--on", "all", "--engine", "gloo", "--restarts", "0", "--", "sh", "-c", script,
        home=ring[0].home,
    )  # fmt: skip
    assert done.returncode == 7
    assert " | bad\n" in done.stderr
    assert "ended with exit code 7; all ranks are ended" in done.stderr


def test_a_script_that_fails_at_once_everywhere_is_started_once(
    fleet: Fleet, ring: list[StartedAgent], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(  # no rank is a second behind the others: it would find one begun again
        "import os, pathlib, time\n"
        f"begun = pathlib.Path({str(tmp_path)!r}, 'begun')\n"
        "begun.mkdir(exist_ok=True)\n"
        "(begun / os.environ['PMESH_PLACE']).touch()\n"
        "while len(list(begun.iterdir())) < 3: time.sleep(0.01)\n"
        "mesh = pmesh.connect()\n"
    )
    done = fleet.pmesh("run", "--on", "all", "--", str(script), home=ring[0].home)
    assert done.returncode == 1
    assert done.stderr.count("NameError") == 3, done.stderr
    assert done.stderr.count("pmesh: all ranks failed in their first 20 s") == 1


def test_no_rank_is_started_again_to_wait_for_one_that_has_finished(
    fleet: Fleet, ring: list[StartedAgent], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, numpy as np, pmesh\n"
        "with pmesh.connect() as mesh:\n"
        "    mesh.barrier()\n"
        "    rank = mesh.rank\n"
        "    print('trained', flush=True)\n"
        "os._exit(3 if rank == 1 else 0)\n"
    )
    done = fleet.pmesh("run", "--on", "all", "--", str(script), home=ring[0].home)
    assert done.returncode == 3, done.stderr
    assert done.stdout.count("trained") == 3
    assert "is not started again: rank" in done.stderr


SLEEPERS = ("--on", "all", "--", "sh", "-c")


def start_sleepers(fleet: Fleet, agent: StartedAgent, marker: str, *options: str) -> Running:
    """Ranks that heed no signal, each with a child; both have the marker as an argument."""
    script = 'trap "" INT TERM HUP; sleep "$0" & echo up; while :; do wait; sleep 0.1; done'
    started = fleet.start_command("run", *options, *SLEEPERS, script, marker, home=agent.home)
    for _ in range(3):
        started.await_line("mac-. +[|] up")
    await_that(lambda: len(running(marker)) == 6, "the child of each rank")
    return started


@pytest.mark.parametrize("victim", ["rank", "agent"])
def test_children_in_groups_of_their_own_end_too(
    fleet: Fleet, ring: list[StartedAgent], victim: str
) -> None:
    """`timeout` makes a group; a signal to the group of the rank does not reach it."""
    marker = f"86400.{os.getpid()}{time.monotonic_ns()}"
    script = 'timeout 86400 sleep "$0" & echo up; wait'
    options = ("--on", "mac-1", "--restarts", "0")
    started = fleet.start_command(
        "run", *options, "--", "sh", "-c", script, marker, home=ring[0].home
    )
    started.await_line("[|] up")
    (rank,) = ranks(marker)
    await_that(lambda: len(running(marker)) == 3, "the rank, its child and its grandchild")
    if victim == "rank":
        psutil.Process(rank).kill()
    else:
        ring[0].process.send_signal(signal.SIGKILL)
    await_that(lambda: not running(marker), "the end of all", within_s=ENDS_S)


@pytest.mark.parametrize("victim", ["ctrl-c", "starter", "agent of the starter"])
def test_nothing_is_left_running_anywhere(
    fleet: Fleet, ring: list[StartedAgent], victim: str
) -> None:
    marker = f"86400.{os.getpid()}{time.monotonic_ns()}"
    started = start_sleepers(fleet, ring[0], marker, "--grace", "1")
    match victim:
        case "ctrl-c":
            started.send_signal(signal.SIGINT)
        case "starter":
            started.send_signal(signal.SIGKILL)
        case _:
            ring[0].process.send_signal(signal.SIGKILL)
    await_that(lambda: not running(marker), "the end of all", within_s=ENDS_S)
    if victim == "ctrl-c":
        started.await_end(code=130)
    elif victim != "starter":
        assert "AgentStopped" in started.await_end(code=1)


def test_a_rank_that_is_killed_is_started_again(fleet: Fleet, ring: list[StartedAgent]) -> None:
    marker = f"86400.{os.getpid()}{time.monotonic_ns()}"
    started = start_sleepers(fleet, ring[0], marker)
    psutil.Process(ranks(marker)[0]).kill()
    started.await_line("ended by SIGKILL; it is started again in 1 s")
    started.await_line("mac-. +[|] up")
    started.send_signal(signal.SIGINT)
    started.send_signal(signal.SIGINT)
    started.await_end(code=130)
    assert not running(marker)


def test_a_machine_that_comes_back_starts_its_rank_again(
    fleet: Fleet, lasting_fleet: Fleet, ring: list[StartedAgent]
) -> None:
    marker = f"86400.{os.getpid()}{time.monotonic_ns()}"
    started = start_sleepers(fleet, ring[0], marker, "--grace", "1")
    ring[2].process.send_signal(signal.SIGKILL)
    started.await_line("mac-3 is lost")
    await_that(lambda: len(running(marker)) == 4, "the end of the lost rank", within_s=ENDS_S)
    ring[2] = lasting_fleet.start_agent("mac-3", "--no-mdns", "--peer", ring[0].address)
    started.await_line("mac-3 is back")
    started.await_line("mac-3 +[|] up")
    started.send_signal(signal.SIGTERM)
    started.await_end(code=143)
    assert not running(marker)


def test_a_detached_launch_goes_on_until_it_is_stopped(
    fleet: Fleet, ring: list[StartedAgent]
) -> None:
    marker = f"86400.{os.getpid()}{time.monotonic_ns()}"
    home = ring[0].home
    script = "echo up; sleep $0"
    options = ("--on", "all", "--detach", "--job", "night")
    done = fleet.pmesh("run", *options, "--", "sh", "-c", script, marker, home=home)
    assert done.returncode == 0, done.stderr
    launch = done.stdout.strip()
    follower = fleet.start_command("logs", "-f", "night", home=home)
    for _ in range(3):
        follower.await_line("mac-. +[|] up")
    assert running(marker)
    assert launch in fleet.pmesh("ps", home=ring[1].home).stdout
    stopped = fleet.pmesh("stop", launch, home=ring[1].home)
    assert stopped.stdout == f"launch {launch} is being ended\n"
    follower.await_end(code=143)
    assert not running(marker)
    assert "ended by" not in fleet.pmesh("logs", launch, home=ring[1].home).stderr
    assert "mac-2 | up\n" in fleet.pmesh("logs", launch, home=ring[1].home).stdout


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")


GLOO = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(total)
print("sum", int(total), flush=True)
dist.destroy_process_group()
"""

RING = """
import mlx.core as mx

group = mx.distributed.init(backend="ring", strict=True)
total = mx.distributed.all_sum(mx.array([10.0 ** group.rank()]), stream=mx.cpu)
print("sum", int(total.item()), flush=True)
"""


each_engine = pytest.mark.parametrize(
    ("engine", "source"),
    [
        pytest.param("gloo", GLOO, marks=needs("torch")),
        pytest.param("mlx-ring", RING, marks=needs("mlx")),
    ],
)


@each_engine
def test_a_script_for_another_launcher_runs_unchanged(
    fleet: Fleet, ring: list[StartedAgent], tmp_path: Path, engine: str, source: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    options = ("--on", "all", "-n", "4", "--engine", engine)
    done = fleet.pmesh("run", *options, "--", str(script), home=ring[0].home)
    assert done.returncode == 0, done.stderr
    assert [line.partition("| ")[2] for line in done.stdout.splitlines()] == ["sum 1111"] * 4
    assert done.stderr.count("not encrypted") == 1


@pytest.mark.netns
@each_engine
def test_machines_of_a_network_find_each_other_s_addresses(
    fleet: Fleet,
    make_lab: Callable[[int], NetLab],
    tmp_path: Path,
    engine: str,
    source: str,
) -> None:
    lab = make_lab(3)
    agents = fleet.start_in(lab)
    allow_runs(agents)
    script = tmp_path / "train.py"
    script.write_text(source)
    options = ("--on", "all", "--engine", engine, "--restarts", "0")
    done = fleet.pmesh("run", *options, "--", str(script), home=agents[0].home)
    assert done.returncode == 0, done.stderr
    assert [line.partition("| ")[2] for line in done.stdout.splitlines()] == ["sum 111"] * 3


def test_an_engine_that_needs_all_ranks_starts_all_of_them_again(
    fleet: Fleet, ring: list[StartedAgent]
) -> None:
    script = (
        'echo "generation $TORCHELASTIC_RESTART_COUNT of $WORLD_SIZE"; '
        'if [ "$TORCHELASTIC_RESTART_COUNT" = 1 ]; then exit 0; fi; sleep 600'
    )
    options = ("--on", "all", "--engine", "gloo", "--restarts", "2", "--grace", "1")
    started = fleet.start_command("run", *options, "--", "sh", "-c", script, home=ring[0].home)
    for _ in range(3):
        started.await_line("generation 0 of 3")
    ring[2].process.send_signal(signal.SIGKILL)
    started.await_line(r"mac-3 is lost.*; all ranks are started again \(1 of 2\)")
    for _ in range(2):
        started.await_line("generation 1 of 2")
    started.await_end(code=0)


def test_no_line_is_lost_or_torn_while_the_terminal_is_slow(
    ring: list[StartedAgent], tmp_path: Path
) -> None:
    lines = 30_000
    script = (
        "import sys, pathlib\n"
        f"for i in range({lines}): print(i, 'x' * 60)\n"
        "sys.stdout.flush()\n"
        f"pathlib.Path({str(tmp_path)!r}, sys.argv[1] + str(__import__('os').getpid())).touch()\n"
    )
    command = (sys.executable, "-m", "pmesh.cli", "run", "--on", "all", "--")
    run = subprocess.Popen(
        [*command, sys.executable, "-c", script, "done"],
        env=os.environ | {"PMESH_HOME": str(ring[0].home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    # Nobody has read a line yet.
    await_that(lambda: len(list(tmp_path.iterdir())) == 3, "a file of each rank")
    text, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0
    for name in ("mac-1", "mac-2", "mac-3"):
        own = [line for line in text.splitlines() if line.startswith(f"{name} | ")]
        assert own == [f"{name} | {i} {'x' * 60}" for i in range(lines)]


@pytest.mark.parametrize("hangs", ["kill -STOP $$", "while :; do sleep 1; done"])
def test_ranks_that_hang_are_started_again(
    fleet: Fleet, ring: list[StartedAgent], hangs: str
) -> None:
    script = f'echo began; [ "$TORCHELASTIC_RESTART_COUNT" = 1 ] && exit 0; {hangs}'
    options = ("--on", "all", "--engine", "gloo", "--hang-timeout", "2", "--grace", "0.5")
    done = fleet.pmesh("run", *options, "--", "sh", "-c", script, home=ring[0].home)
    assert done.returncode == 0, done.stderr
    assert "no rank has printed anything for 2 s; all ranks are started again" in done.stderr
    assert done.stdout.count("began") == 6


def start_chatter(ring: list[StartedAgent], *, output: int) -> "subprocess.Popen[bytes]":
    """Ranks that print for ever, and a `pmesh run` that shows it."""
    return subprocess.Popen(
        [sys.executable, "-m", "pmesh.cli", "run", *SLEEPERS, "while :; do echo x; done"],
        env=os.environ | {"PMESH_HOME": str(ring[0].home)},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def test_a_pipe_that_is_closed_ends_all(ring: list[StartedAgent]) -> None:
    reading, writing = os.pipe()
    with start_chatter(ring, output=writing) as run:
        os.close(writing)
        assert os.read(reading, 4096)
        os.close(reading)
        _, errors = run.communicate(timeout=TIMEOUT_S)
    assert (run.returncode, errors.count(b"\n"), errors[:8]) == (1, 1, b"runs on ")
    await_that(lambda: not running("while :; do echo x; done"), "the end of all", within_s=ENDS_S)


def test_a_third_signal_ends_a_run_that_can_not_print(ring: list[StartedAgent]) -> None:
    reading, writing = os.pipe()
    try:
        with start_chatter(ring, output=writing) as run:
            os.close(writing)
            await_that(lambda: select.select([reading], [], [], 0)[0], "something to read")
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # two alike may be one
                run.send_signal(number)
            _, errors = run.communicate(timeout=TIMEOUT_S)
        assert run.returncode in {129, 130, 143}
        assert (errors.count(b"\n"), errors[:8]) == (1, b"runs on ")
    finally:
        os.close(reading)


def test_another_version_of_the_script_is_named_and_nothing_starts(
    fleet: Fleet, lasting_fleet: Fleet, ring: list[StartedAgent], tmp_path: Path
) -> None:
    """All homes are on one disk: HOME tells the machines apart."""
    here, there = tmp_path / "here", tmp_path / "there"
    for home in (here, there):
        (home / "project").mkdir(parents=True)
        (home / "project" / "train.py").write_text(f"print({home.name!r})")
    peer = ("--no-mdns", "--peer", ring[0].address)
    other = lasting_fleet.start_agent("mac-4", *peer, HOME=str(there))
    lasting_fleet.await_view(*ring, other)
    allow_run(other.home, (), as_root=True, no=False)
    options = ("--on", "mac-1,mac-4", "--cwd", str(here / "project"))
    started = fleet.start_command(
        "run", *options, "--", "train.py", home=ring[0].home, HOME=str(here)
    )
    output = started.await_end(code=1)
    assert "mac-4: train.py differs from the starter's; copy it there, or give --sync" in output
    other.process.reap()
