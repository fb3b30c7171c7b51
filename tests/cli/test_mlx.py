"""`pmesh mlx`: which program a command line names, and what it becomes."""

import errno
import os
import sys
from pathlib import Path

import pytest

from pmesh.cli import mlx
from pmesh.cli.app import run
from pmesh.cli.mlx import Program, program_of, trains_lora
from pmesh.errors import ConfigError, UsageError
from pmesh.launches.client.launched import MLXLaunch
from tests.worlds.faults import Faults
from tests.worlds.watched_agent import WatchedAgent, watched_agent

HERE = sys.executable


def console_script(folder: Path, name: str, first_lines: str) -> str:
    path = folder / name
    path.write_text(first_lines + "import mlx_lm\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train.py --epochs 3", ("script", "train.py", ["--epochs", "3"], [])),
        ("-m a.b --x", ("module", "a.b", ["--x"], [])),
        ("PYTHON train.py -m", ("script", "train.py", ["-m"], [])),
        (
            "PYTHON -u -X dev -W error -m a -c",
            ("module", "a", ["-c"], ["-u", *["-X", "dev", "-W", "error"]]),
        ),
        ("PYTHON -c pass 1", ("code", "pass", ["1"], [])),
    ],
)
def test_a_command_line_names_a_program(
    command: str, expected: tuple[str, str, list[str], list[str]]
) -> None:
    program = program_of([HERE if word == "PYTHON" else word for word in command.split()])
    found = (program.kind, program.target, list(program.arguments), list(program.flags))
    assert found == expected
    assert program.python == HERE


@pytest.mark.parametrize(
    "first_lines",
    [
        "#!/opt/env/bin/python3.12\n",
        '#!/bin/sh\n\'\'\'exec\' "/opt/env/bin/python3.12" "$0" "$@"\n',
    ],
)
def test_a_console_script_runs_in_the_python_that_it_names(
    tmp_path: Path, first_lines: str
) -> None:
    script = console_script(tmp_path, "mlx_lm.lora", first_lines)
    program = program_of([script, "--train"])
    assert program == Program(
        kind="script", target=script, arguments=("--train",), python="/opt/env/bin/python3.12"
    )


@pytest.mark.parametrize(
    "first_line",
    [
        "#!/usr/bin/env python3\n",
        "#! /usr/bin/env python3\n",
        "#!/usr/bin/env python3 -u\n",
        "#!/usr/bin/env -S python3 -u\n",
    ],
)
def test_a_script_may_leave_its_python_to_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_line: str
) -> None:
    python = console_script(tmp_path, "python3", "#!/bin/sh\n")
    script = console_script(tmp_path, "chat", first_line)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program_of(["chat"]).python == python
    assert program_of(["chat"]).target == script


def test_a_file_that_can_t_be_read_is_one_line_or_left_to_mlx_lm(
    tmp_path: Path, faults: Faults
) -> None:
    script = console_script(tmp_path, "chat", "#!/usr/bin/env python3\n")
    config = tmp_path / "lora.yaml"
    config.write_text("train: true\n")
    for call in ("open", "read_text"):
        faults.fail(Path, call, PermissionError(errno.EACCES, "Permission denied"))
    with pytest.raises(UsageError, match=f"can't read {script}: Permission denied"):
        program_of([script])
    assert not trains_lora(program_of(["-m", "mlx_lm.lora", "-c", str(config)]))


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        ([], ConfigError, "there is no program; type for example"),
        (["no-such-program"], UsageError, "there is no program 'no-such-program'"),
        (["sh"], UsageError, "sh is not a Python program"),
        ([HERE], ConfigError, "there is no program after 'python'"),
        ([HERE, "-W"], ConfigError, "there is no program after 'python'"),
        (["-m"], ConfigError, "after -m there must be something to run"),
    ],
)
def test_what_is_no_program_is_refused(
    command: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        program_of(command)


@pytest.mark.parametrize(
    ("command", "name", "trains"),
    [
        ("train.py --train", "train", False),
        ("-m mlx_lm.lora --train --model m", "mlx_lm.lora", True),
        ("-m mlx_lm lora --train", "mlx_lm.lora", True),
        ("-m mlx_lm generate --train", "mlx_lm.generate", False),
        ("-m mlx_lm", "mlx_lm", False),
        ("-m mlx_lm.lora --test", "mlx_lm.lora", False),
        ("-m mlx_lm.lora -c YAML", "mlx_lm.lora", True),
        ("-m mlx_lm.lora -c LATIN1", "mlx_lm.lora", True),
        ("-m mlx_lm.lora --config no-such-file", "mlx_lm.lora", False),
        ("PYTHON -c pass", "python", False),
    ],
)
def test_only_the_training_of_mlx_lm_lora_has_a_loop_of_ours(
    tmp_path: Path, command: str, name: str, *, trains: bool
) -> None:
    config = tmp_path / "lora.yaml"
    config.write_text("model: m\ntrain: true\n")
    latin1 = tmp_path / "latin1.yaml"
    latin1.write_bytes(b"# f\xfcr uns\ntrain: true\n")
    known = {"PYTHON": HERE, "YAML": str(config), "LATIN1": str(latin1)}
    program = program_of([known.get(word, word) for word in command.split()])
    assert program.name == name
    assert trains_lora(program) is trains


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedAgent:
    """Its home is given; the variables that the command sets are gone after the test."""
    for name in (*MLXLaunch(job="", wait_for=0).variables(), "PMESH_HOME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PMESH_HOME", str(tmp_path / "home"))
    return WatchedAgent(tmp_path / "home")


@pytest.fixture
def became(faults: Faults) -> list[list[str]]:
    """What this process would have become, with MLX installed."""
    found: list[list[str]] = []
    faults.pretend(mlx, "find_spec", lambda name: name)
    faults.pretend(os, "execv", lambda _, words: found.append(words))
    return found


@pytest.mark.usefixtures("agent")
def test_the_process_becomes_the_program(became: list[list[str]], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    options = ["--wait-for", "3", "--job", "mine", "--compression", "int8"]
    run(["mlx", *options, HERE, "-u", str(script), "--wait-for", "9"])
    words = [HERE, "-u", "-m", "pmesh.mlx.program", "script", str(script), "--wait-for", "9"]
    assert became == [words]
    assert MLXLaunch.of(os.environ) == MLXLaunch(job="mine", wait_for=3, compression="int8")


@pytest.mark.usefixtures("agent")
def test_under_pmesh_run_the_launch_names_the_job_and_its_size(
    became: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch on two of three machines is no job of three."""
    monkeypatch.setenv("PMESH_JOB", "train-4711")
    monkeypatch.setenv("PMESH_WAIT_FOR", "2")
    run(["mlx", "-m", "steps"])
    assert MLXLaunch.of(os.environ) == MLXLaunch(job="train-4711", wait_for=2)
    run(["mlx", "--job", "mine", "--wait-for", "3", "-m", "steps"])
    assert MLXLaunch.of(os.environ) == MLXLaunch(job="mine", wait_for=3)
    monkeypatch.setenv("PMESH_WAIT_FOR", "two")
    assert run(["mlx", "-m", "steps"]) == 1
    assert len(became) == 2


@pytest.mark.usefixtures("agent")
def test_mlx_lms_own_loop_runs_where_it_is_asked_for(
    became: list[list[str]], faults: Faults
) -> None:
    lora = pytest.importorskip("pmesh.mlx_lm")
    trained: list[list[str]] = []

    def train(words: list[str]) -> int:
        trained.append(words)
        return 0

    faults.pretend(lora, "train", train)
    command = ["-m", "mlx_lm", "lora", "--train"]
    assert run(["mlx", "--wait-for", "2", *command]) == 0
    assert (trained, became) == ([["--train"]], [])
    run(["mlx", "--wait-for", "2", "--no-elastic", *command])
    assert became == [[HERE, "-m", "pmesh.mlx.program", "module", "mlx_lm", "lora", "--train"]]
    assert MLXLaunch.of(os.environ) == MLXLaunch(job="mlx_lm.lora", wait_for=2)


def test_without_a_number_it_begins_with_all_machines(
    tmp_path: Path,
    became: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in (*MLXLaunch(job="", wait_for=0).variables(), "PMESH_HOME"):
        monkeypatch.setenv(name, "")
    with watched_agent(tmp_path / "home") as agent:
        run(["mlx", "--home", str(agent.home), "-m", "steps"])
    assert len(became) == 1
    assert MLXLaunch.of(os.environ) == MLXLaunch(job="steps", wait_for=1)
    assert "waiting until" not in capsys.readouterr().err


@pytest.mark.usefixtures("agent")
def test_what_can_not_be_started_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = console_script(tmp_path, "gone", "#!/no/such/python3\n")
    assert run(["mlx", "--wait-for", "2", script]) == 1
    assert run(["mlx", "--wait-for", "2", "no-such-file.py"]) == 1
    assert run(["mlx", "--wait-for", "2", f"{'x' * 300}.py"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("UsageError: can't start /no/such/python3: No such file")
    assert said[1] == "UsageError: there is no file no-such-file.py"
    assert said[2].startswith("UsageError: there is no file xxx")


@pytest.mark.usefixtures("agent")
def test_without_mlx_it_is_said_what_to_install(
    became: list[list[str]], capsys: pytest.CaptureFixture[str], faults: Faults
) -> None:
    faults.instead(mlx, "find_spec", lambda _: None)
    assert run(["mlx", "--wait-for", "2", HERE, "-c", "pass"]) == 1
    assert became == []
    said = capsys.readouterr().err
    assert said.startswith("UsageError: mlx is not installed beside pmesh: pip install ")


@pytest.mark.usefixtures("agent")
def test_another_python_may_have_what_is_not_installed_here(
    became: list[list[str]], tmp_path: Path, faults: Faults
) -> None:
    faults.forbid(mlx, "find_spec")
    python = console_script(tmp_path, "python3", "#!/bin/sh\n")
    run(["mlx", "--wait-for", "2", python, "-c", "pass"])
    assert became == [[python, "-m", "pmesh.mlx.program", "code", "pass"]]


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--wait-for=0"], "UsageError: wait_for is at least 1"),
        (["--wait-for=2", "--job="], "UsageError: a job's name has 1 to"),
        (["--wait-for=2", "--compression=int9"], "UnsupportedCompression: no compression 'int9'"),
    ],
)
def test_an_option_that_no_job_can_have_is_refused_before_the_program_begins(
    became: list[list[str]], options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["mlx", *options, HERE, "-c", "pass"]) == 1
    assert became == []
    assert capsys.readouterr().err.startswith(said)
