"""The command line itself: usage errors, versions, exit codes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pmesh.cli
from pmesh import native
from pmesh.cli import app as app_module
from pmesh.cli.app import IN_ORDER_OF_USE, app, run
from pmesh.core.wire import aead
from pmesh.core.wire.link import PROTOCOL_VERSION
from pmesh.installed import installed_version
from tests.worlds.faults import Faults
from tests.worlds.system import be_called

VERSION = f"pmesh {installed_version()}, protocol {PROTOCOL_VERSION}, with"


@pytest.mark.parametrize("words", [["version"], ["--version"]])
def test_the_version_names_the_protocol(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 0
    said = capsys.readouterr().out
    assert said.startswith(VERSION)


def test_the_version_says_how_to_work_with_the_native_library_and_without(
    faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    faults.instead(native, "why_missing", lambda: "")
    assert run(["version"]) == 0
    faults.instead(native, "why_missing", lambda: "no C compiler was found")
    assert run(["version"]) == 0
    has, lacks = (line.rpartition(", with")[2] for line in capsys.readouterr().out.splitlines())
    assert has == " its native library (without it: PMESH_NATIVE=0)"
    assert lacks == "out its native library, which is faster: no C compiler was found"


def test_the_version_says_that_lanes_are_encrypted_slowly_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aead, "WHY_SLOW", "pyaegis is missing")
    assert run(["version"]) == 0
    monkeypatch.setattr(aead, "WHY_SLOW", "")
    assert run(["version"]) == 0
    slow, fast = capsys.readouterr().out.splitlines()
    said = "encrypts lanes without AES instructions, hundreds of times slower: pyaegis is missing"
    assert slow == f"{fast}; it {said}"


def test_help_lists_the_commands_in_the_order_in_which_one_uses_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[1] for line in lines if line[:2] == "│ " and line[2:3].isalpha()]
    assert listed == list(IN_ORDER_OF_USE)


@pytest.mark.parametrize("words", [["--help"], ["up", "--help"], ["key", "--help"], []])
def test_help_is_no_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 0
    assert "pmesh" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["dance"],
        ["up", "--loud"],
        ["up", "--min-peers", "many"],
        ["up", "--log-level", "loud"],
        ["status", "now"],
        ["up", "--name"],
        ["events", "--watch"],
        ["run", "--fast", "python", "train.py"],
    ],
)
def test_a_misused_command_is_one_line_and_exit_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert re.fullmatch(r"UsageError: .*; see 'pmesh( [a-z]+)* --help'\n", shown.err)
    assert not shown.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ps", "--jsn"], "UsageError: Unknown option: --jsn; see 'pmesh ps --help'\n"),
        (
            ["allow", "run", "--x"],
            "UsageError: Unknown option: --x; see 'pmesh allow run --help'\n",
        ),
    ],
)
def test_a_misused_command_names_its_own_help(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    assert capsys.readouterr().err == said


def test_a_bad_value_of_an_option_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", "--home", str(tmp_path), "--listen", "::1"]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: --listen = '::1': an IPv6 address is written [ADDRESS]:PORT\n"
    )


def test_the_program_exits_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    be_called(monkeypatch, "pmesh", "version")
    with pytest.raises(SystemExit) as caught:
        pmesh.cli.main()
    assert caught.value.code == 0


def test_ctrl_c_while_the_program_loads_shows_no_traceback(faults: Faults) -> None:
    faults.fail(app_module, "run", KeyboardInterrupt())
    with pytest.raises(SystemExit) as caught:
        pmesh.cli.main()
    assert caught.value.code == 130


def test_what_a_person_leaves_open_imports_nothing_of_the_agent(tmp_path: Path) -> None:
    """One process for all: what none of them imports is not in it at the end."""
    program = """
import sys
import pmesh.cli.dashboard.command
from pmesh.cli.app import app, run

for line in ("--help", "status", "top", "events", "status --help", "completion zsh"):
    run(line.split())
heavy = "cryptography matplotlib nacl networkx numpy psutil structlog torch trio zeroconf".split()
print("imported:", *[name for name in heavy if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=dict(os.environ, PMESH_HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count("AgentNotRunning") == 3
    assert done.stdout.splitlines()[-1] == "imported:"


def imported_by(program: str) -> set[str]:
    """Run these lines of Python, and return all modules that they have imported."""
    words = [sys.executable, "-c", f"import sys\n{program}\nprint(*sys.modules)"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_help_imports_no_command() -> None:
    imported = imported_by("from pmesh.cli.app import run; run(['--help'])")
    assert "pmesh.cli.app" in imported
    assert not {"msgspec", "pmesh.cli.status", "pmesh.client.control"} & imported


def test_the_dashboard_imports_nothing_that_only_a_terminal_or_the_agent_needs() -> None:
    imported = imported_by("import pmesh.cli.app, pmesh.cli.dashboard.command")
    assert "pmesh.cli.dashboard.command" in imported
    assert not {"rich.console", "pmesh.agent.config", "pmesh.native"} & imported


def test_a_reader_that_stops_early_sees_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, "-m", "pmesh.cli", "version"]
    done = subprocess.run(program, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.stderr, done.returncode) == (b"", 1)


@pytest.mark.parametrize(
    ("command", "closed", "code", "lines"),
    [
        ("version", ">&-", 0, 0),
        ("key set", "<&-", 2, 1),
        ("join", "<&-", 2, 1),
        ("join", "2>&-", 2, 0),
    ],
)
def test_a_closed_standard_stream_is_no_error(
    command: str, closed: str, code: int, lines: int, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "pmesh.cli", *command.split()]
    done = subprocess.run(
        ["/bin/sh", "-c", f'"$@" {closed}', "sh", *words],
        env=dict(os.environ, PMESH_HOME=str(tmp_path / "home")),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (code, lines)


def test_what_a_command_starts_has_all_three_streams_though_its_own_are_closed() -> None:
    looks = "import os; [os.fstat(descriptor) for descriptor in range(3)]"
    words = [sys.executable, "-m", "pmesh.cli", "run", sys.executable, "-c", looks]
    done = subprocess.run(["/bin/sh", "-c", '"$@" <&- >&- 2>&-', "sh", *words], check=False)
    assert done.returncode == 0


def test_a_terminal_without_utf_8_gets_question_marks() -> None:
    program = "import sys; from pmesh.cli.app import run; from pmesh.terminal.lines import say; "
    done = subprocess.run(
        [sys.executable, "-c", program + "run(['version']); say('★')"],
        env=dict(os.environ, PYTHONIOENCODING="ascii:strict"),
        capture_output=True,
        text=True,
        check=True,
    )
    version_line, star = done.stdout.splitlines()
    assert version_line.startswith(VERSION)
    assert star == "?"


def test_every_command_of_the_issue_is_there() -> None:
    assert {"key", "up", "status", "events", "run", "down", "version"} <= set(app)
