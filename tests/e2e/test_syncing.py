"""`pmesh run --on all --sync`: machines that hold nothing of the project run it all the same."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pmesh.launches.cli.launches import allow_run
from tests.e2e.harness import TIMEOUT_S, Fleet, StartedAgent, allow_runs
from tools.lab.net import NetLab, clean

pytestmark = pytest.mark.slow

TRAIN = """
import pathlib, sys
import numpy as np, pmesh
from model.layers import SIZE

with pmesh.connect() as mesh:
    total = int(mesh.all_reduce(np.array(SIZE)))
pathlib.Path("result").write_text(str(total))
print("sum", total, pathlib.Path.cwd().name == sys.argv[1], flush=True)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory of the starter alone, with a data set that git ignores."""
    root = tmp_path / "project"
    (root / "model").mkdir(parents=True)
    (root / "train.py").write_text(TRAIN)
    (root / "model" / "__init__.py").touch()
    (root / "model" / "layers.py").write_text("SIZE = 5\n")
    (root / "data.bin").write_bytes(bytes(200_000_000))
    (root / ".gitignore").write_text("data.bin\nresult\n")
    subprocess.run(["git", "init", "-q", root], check=True)
    return root


def user_of(agent: StartedAgent) -> Path:
    """The HOME of the machine's user: all machines of a test share a disk."""
    return agent.home.with_name(f"{agent.name}-user")


@pytest.fixture(scope="module")
def three() -> Iterator[list[StartedAgent]]:
    """Machines of a network, each with a home and a user's home of its own."""
    clean()  # what a run that was killed has left
    with NetLab(3) as lab, Fleet() as fleet:
        agents: list[StartedAgent] = []
        for host in lab.hosts:
            name = f"mac-{host.number}"
            own = fleet.home(f"{name}-user")
            own.mkdir()
            agents.append(fleet.start_agent(name, host=host, HOME=str(own)))
        fleet.await_view(*agents)
        yield agents


@pytest.fixture
def machines(three: list[StartedAgent]) -> list[StartedAgent]:
    """All allow every member to run commands."""
    allow_runs(three)
    return three


def run(
    fleet: Fleet, agent: StartedAgent, project: Path, *words: str
) -> subprocess.CompletedProcess[str]:
    options = ("--on", "all", "--sync", "--cwd", str(project))
    return fleet.pmesh("run", *options, *words, home=agent.home)


def copies_of(agent: StartedAgent) -> list[Path]:
    folder = agent.home / "sync" / "copies"
    return (
        sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime) if folder.exists() else []
    )


def stored(agent: StartedAgent) -> int:
    files = (agent.home / "sync" / "files").glob("*/*")
    return sum(1 for _ in files)


@pytest.mark.netns
def test_a_project_of_one_machine_trains_on_three_and_only_changes_are_sent_again(
    fleet: Fleet, machines: list[StartedAgent], project: Path
) -> None:
    done = run(fleet, machines[0], project, "--", "train.py", "project")
    assert done.returncode == 0, done.stderr
    lines = [f"mac-{n} | sum 15 False" for n in (1, 2, 3)]
    assert sorted(done.stdout.splitlines()) == lines
    for agent in machines:
        (copy,) = copies_of(agent)
        assert (copy / "result").read_text() == "15"
        assert not (copy / "data.bin").exists()
        assert stored(agent) == 4  # three files that are not empty, and the tree
    assert not (project / "result").exists()
    assert f"of the directory, here: {copies_of(machines[0])[0]}\n" in done.stderr

    (project / "model" / "layers.py").write_text("SIZE = 7\n")
    done = run(fleet, machines[0], project, "--", "train.py", "project")
    assert min(done.stdout.splitlines()) == "mac-1 | sum 21 False"
    for agent in machines:
        assert len(copies_of(agent)) == 2
        assert stored(agent) == 6  # one file more, and another tree
    done = run(fleet, machines[0], project, "--", "train.py", "project")
    assert done.returncode == 0, done.stderr
    assert [stored(agent) for agent in machines] == [6, 6, 6]


@pytest.mark.netns
def test_a_detached_launch_and_modules_run_in_the_copy_too(
    fleet: Fleet, machines: list[StartedAgent], project: Path
) -> None:
    (project / "model" / "show.py").write_text(
        "from model.layers import SIZE\nprint('size', SIZE)\n"
    )
    done = run(fleet, machines[1], project, "--detach", "--job", "night", "-m", "model.show")
    assert done.returncode == 0, done.stderr
    follower = fleet.start_command("logs", "-f", "night", home=machines[1].home)
    for _ in range(3):
        follower.await_line("mac-. +[|] size 5")
    follower.await_end(code=0)


@pytest.mark.netns
def test_what_forbids_a_start_is_named_and_nothing_starts_or_stays(
    fleet: Fleet, machines: list[StartedAgent], project: Path
) -> None:
    done = run(fleet, machines[0], project, "--sync-limit", "10", "--", "train.py")
    assert done.returncode == 2
    assert "ConfigError: the files to send have" in done.stderr
    (project / "data").symlink_to("/mnt/data")
    done = run(fleet, machines[0], project, "--", "train.py")
    assert "'data' is a link to '/mnt/data', outside of the directory" in done.stderr
    (project / "data").unlink()
    before = copies_of(machines[2])
    allow_run(machines[2].home, (), as_root=False, no=True)
    done = run(fleet, machines[0], project, "--", "touch", str(project / "ran"))
    assert done.returncode == 1
    assert done.stderr == (
        "UsageError: mac-3: it does not run what others ask for; "
        "if it shall, type there: pmesh allow run\n"
    )
    assert not (project / "ran").exists()
    assert copies_of(machines[2]) == before


@pytest.mark.netns
def test_without_sync_a_script_that_others_lack_is_named_with_both_cures(
    fleet: Fleet, machines: list[StartedAgent]
) -> None:
    own = user_of(machines[0])
    (own / "project").mkdir()
    (own / "project" / "train.py").write_text("import model\n")
    (own / "project" / "model.py").write_text("x = 1\n")
    options = ("--on", "all", "--cwd", str(own / "project"))
    command = ("run", *options, "--", "train.py")
    started = fleet.start_command(*command, home=machines[0].home, HOME=str(own))
    assert "mac-2: there is no directory '~/project'; copy it there, or give --sync or --cwd" in (
        started.await_end(code=1)
    )
    for x, agent in enumerate(machines[1:], 1):
        there = user_of(agent) / "project"
        there.mkdir()
        (there / "train.py").write_text("import model\n")
        (there / "model.py").write_text(f"x = {x}\n")
    started = fleet.start_command(*command, home=machines[0].home, HOME=str(own))
    assert "mac-3: model.py differs from the starter's; copy it there, or give --sync" in (
        started.await_end(code=1)
    )
    synced = fleet.start_command(
        "run", "--sync", *command[1:], home=machines[0].home, HOME=str(own)
    )
    synced.await_end(code=0)


@pytest.fixture
def small_disk(fleet: Fleet) -> Iterator[Path]:
    """The home of mac-2 on a file system with room for 3 MiB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a small file system is made by root, on Linux")
    path = fleet.home("mac-2")
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m,mode=700", "tmpfs", path],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode()}")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def test_a_disk_without_room_for_the_files_is_named_and_nothing_starts(
    fleet: Fleet, small_disk: Path, project: Path
) -> None:
    ring = fleet.start_ring("mac-1", "mac-2")
    allow_runs(ring)
    (project / "weights").write_bytes(os.urandom(2 << 20))
    done = run(fleet, ring[0], project, "--", "touch", str(project / "ran"))
    assert done.returncode == 1
    assert "UsageError: mac-2: its disk has" in done.stderr
    assert "free some space there" in done.stderr
    assert not (project / "ran").exists()
    (project / "weights").write_bytes(os.urandom(1 << 18))
    done = run(fleet, ring[0], project, "--", "cat", "model/layers.py")
    assert done.returncode == 0, done.stderr
    assert small_disk == ring[1].home


def test_a_full_disk_under_the_output_is_named_and_the_ranks_go_on(
    fleet: Fleet, small_disk: Path
) -> None:
    ring = fleet.start_ring("mac-1", "mac-2")
    allow_runs(ring)
    with (small_disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    lines = 100
    script = f"for i in range({lines}): print('line', i, flush=True)"
    done = fleet.pmesh(
        "run", "--on", "mac-1,mac-2", "--job", "night", "--", sys.executable, "-c", script,
        home=ring[0].home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in ("mac-1", "mac-2"):
        own = [line for line in done.stdout.splitlines() if line.startswith(f"{name} | ")]
        assert own == [f"{name} | line {i}" for i in range(lines)]
    notice = "mac-2 | pmesh: its disk takes no output, as it is full: free some space there"
    assert done.stderr.count(notice) == 1, done.stderr
    for agent in ring:
        logs = fleet.pmesh("logs", "night", home=agent.home)
        assert logs.stderr.count(notice) == 1, logs.stderr
        assert f"mac-2 | line {lines - 1}\n" in logs.stdout


@pytest.fixture
def slow_line(fleet: Fleet, make_lab: Callable[[int], NetLab]) -> list[StartedAgent]:
    """Two machines, with 24 Mbit/s between them."""
    lab = make_lab(2)
    for host in lab.hosts:
        lab.shape(host, bits_per_s=24_000_000)
    agents = fleet.start_in(lab)
    allow_runs(agents)
    return agents


@pytest.mark.netns
def test_a_long_transfer_is_shown_changes_no_view_and_ends_with_ctrl_c(
    fleet: Fleet, slow_line: list[StartedAgent], project: Path
) -> None:
    (project / "weights").write_bytes(os.urandom(9_000_000))  # 3 s
    epoch = fleet.await_view(*slow_line)
    ours, theirs = os.openpty()
    sending = subprocess.Popen(
        [*(sys.executable, "-m", "pmesh.cli", "run", "--on", "all", "--sync"),
         *("--cwd", project, "--", "true")],
        env=os.environ | {"PMESH_HOME": str(slow_line[0].home), "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while b"files for mac-2" not in shown:
        shown += os.read(ours, 4096)
    sending.send_signal(signal.SIGINT)
    assert sending.wait(TIMEOUT_S) == 130
    os.close(ours)
    assert copies_of(slow_line[1]) == []

    done = run(fleet, slow_line[0], project, "--", "true")
    assert done.returncode == 0, done.stderr
    assert len(copies_of(slow_line[1])) == 1
    assert fleet.await_view(*slow_line) == epoch


@pytest.mark.netns
def test_mpirun_gets_a_host_file_and_nothing_is_started(
    fleet: Fleet, machines: list[StartedAgent], tmp_path: Path
) -> None:
    options = ("--on", "all", "--engine", "mpi")
    done = fleet.pmesh("run", *options, home=machines[0].home)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"10.77.0.{n} slots=1" for n in (1, 2, 3)]
    assert done.stderr == (
        "save these lines as 'hosts', then type: mpirun --hostfile hosts COMMAND\n"
    )
    done = fleet.pmesh(
        "run", "--on", "mac-3", "--per-node", "4", *options[2:], "--", "touch", str(tmp_path / "x"),
        home=machines[0].home,
    )  # fmt: skip
    assert done.stdout == "10.77.0.3 slots=4\n"
    assert f"mpirun --hostfile hosts touch {tmp_path}/x" in done.stderr
    assert not (tmp_path / "x").exists()
    done = fleet.pmesh("run", "--on", "mac-9", *options[2:], home=machines[0].home)
    assert "UsageError: no machine is called 'mac-9'; there are" in done.stderr


@pytest.mark.netns
def test_what_ranks_have_written_is_named_and_comes_back(
    fleet: Fleet, machines: list[StartedAgent], project: Path, tmp_path: Path
) -> None:
    write = ("sh", "-c", "echo $PMESH_HOME >out.txt; ln -s /etc/passwd link")
    done = run(fleet, machines[1], project, "--", *write)
    assert done.returncode == 0, done.stderr
    (fetch,) = re.findall("'pmesh fetch ([0-9a-f]{12})' brings them here", done.stderr)
    for agent in machines:
        assert f"new files on {agent.name}: out.txt (" in done.stderr
    done = fleet.pmesh("fetch", fetch, "--to", str(tmp_path / "new"), home=machines[1].home)
    assert done.returncode == 0, done.stderr
    for agent in machines:
        files = list((tmp_path / "new" / agent.name).iterdir())
        assert [file.read_text() for file in files] == [f"{agent.home}\n"]
    done = fleet.pmesh("fetch", fetch, home=machines[0].home)
    assert done.returncode == 1
    assert "fetch its files there" in done.stderr
    collect = ("--collect", str(tmp_path / "results"))
    done = run(fleet, machines[0], project, *collect, "--", *write)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "results").glob("*/out.txt"))) == 3
