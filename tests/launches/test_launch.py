"""What `pmesh run --on` asks for, and how it shows what comes back."""

import contextlib
import io
import math
import os
import pwd
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from pmesh.cli import up
from pmesh.cli.app import run
from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.session import encode
from pmesh.errors import AgentStopped, ConfigError
from pmesh.home_paths import home_directory, socket_path
from pmesh.ids import NodeId, node_text
from pmesh.launches.agent.checks import digest_of
from pmesh.launches.agent.permission import load_permission
from pmesh.launches.cli import launches
from pmesh.launches.cli.launch import AgentStream, RunOptions, Screen, launch_of
from pmesh.launches.rules.lines import STARTER
from pmesh.launches.wire.messages import Launch, LaunchBegan, LaunchInput, LaunchOver, LaunchTerms
from simulation.wire import decode_request_untrusted
from tests.worlds.fake_status_agent import IDS, agent_at, answer_well
from tests.worlds.faults import Faults
from tests.worlds.system import be_a_terminal

HERE = {"PATH": os.environ["PATH"]}
SHELL = RunOptions(shell=True)  # noqa: S604 - no subprocess


def words_of(*words: str, options: RunOptions | None = None) -> tuple[str, ...]:
    return launch_of(words, options or RunOptions(), HERE).command.words


def test_a_script_runs_with_the_python_that_runs_pmesh(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = words_of("train.py", "--epochs", "3", options=RunOptions(cwd=tmp_path))
    assert words[1:] == ("train.py", "--epochs", "3")
    assert Path(words[0]).name.startswith("python")


def test_a_module_a_shell_and_another_python_can_be_asked_for(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    python = RunOptions(python=sys.executable, cwd=tmp_path)
    assert words_of("python", "x", options=python)[1:] == ("x",)
    assert words_of("a", options=RunOptions(module="pkg.train"))[1:] == ("-m", "pkg.train", "a")
    assert words_of("echo a | cat", options=SHELL) == ("/bin/sh", "-c", "echo a | cat")
    assert words_of("echo", "a b", options=SHELL)[2] == "echo 'a b'"


def test_a_program_on_the_path_is_looked_up_on_each_machine() -> None:
    assert words_of("sleep", "1") == ("sleep", "1")


def test_a_virtual_environment_must_be_at_the_same_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    program = tmp_path / "venv" / "bin" / "tool"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    request = launch_of(["tool"], RunOptions(cwd=tmp_path / "venv"), {"PATH": str(program.parent)})
    assert request.command.words == ("~/venv/bin/tool",)
    assert request.command.cwd == "~/venv"


def test_the_files_and_packages_that_the_command_names_are_hashed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("1")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("2")
    (tmp_path / "data.csv").write_text("3")
    options = RunOptions(cwd=tmp_path)
    named = launch_of(["train.py", "pkg", "data.csv"], options, HERE).command.digests
    assert [digest.path for digest in named] == ["train.py", "pkg/__init__.py", "pkg"]
    by_module = launch_of(["x"], RunOptions(cwd=tmp_path, module="pkg"), HERE).command.digests
    assert by_module == named[1:]
    (tmp_path / "pkg" / "more.py").write_text("4")
    assert digest_of(tmp_path, "pkg") != named[2]


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ([], RunOptions(), "there is no command"),
        (["no-such-program"], RunOptions(), "there is no program 'no-such-program' here"),
        (["true", "\0"], RunOptions(), "null character"),
        (["true", "\udc80"], RunOptions(), "not valid UTF-8"),
        (["true", "x" * 70_000], RunOptions(), "too long"),
        (["true"], RunOptions(environment=["X"]), "--env 'X' is not NAME=VALUE"),
        (["true"], RunOptions(environment=["PMESH_JOB=x"]), "PMESH_JOB may not be set"),
        (["no-such.py"], RunOptions(), "there is no 'no-such.py' in .*; give the path"),
        (["python3", "no-such.py"], RunOptions(), "there is no 'no-such.py'"),
        (["python3", "x" * 300], RunOptions(), "there is no 'xxx"),  # too long for a name
        (["python3", "~no-one/a.py"], RunOptions(), "knows no home directory of ~no-one;"),
        (["~no-one/a"], RunOptions(), "knows no home directory of ~no-one; write the whole path"),
        (["true"], RunOptions(cwd=Path("~no-one")), "knows no home directory of ~no-one;"),
        (
            ["true"],
            RunOptions(sync=True, collect=Path("~no-one")),
            "knows no home directory of ~no-one;",
        ),
        ([], RunOptions(), "there is no command; type for example: pmesh run --on all"),
        ([], SHELL, "there is no command; type for example: pmesh run --on all"),
        (["true"], RunOptions(on=" ,"), "--on names no machine; give all"),
        (["true"], RunOptions(on="x" * 65), "--on: a machine's name has at most 64 characters"),
        (["true"], RunOptions(count=-1), "--count is -1, but must be from 0 to 1024"),
        (["true"], RunOptions(per_node=65), "--per-node is 65, but must be from 1 to 64"),
        (["true"], RunOptions(terms=LaunchTerms(restarts=-1)), "--restarts is -1"),
        (["true"], RunOptions(terms=LaunchTerms(grace_s=math.nan)), "--grace is nan"),
        (["true"], RunOptions(terms=LaunchTerms(hang_timeout_s=1e9)), "--hang-timeout is"),
        (["true"], RunOptions(job="a\nb"), "--job 'a.nb': the name of a job"),
        (["true"], RunOptions(job="x" * 65), "has at most 64 characters"),
    ],
)
def test_what_can_not_be_asked_for_is_named(
    words: list[str], options: RunOptions, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        launch_of(words, options, HERE)


def test_a_user_without_a_home_directory_can_start_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    monkeypatch.delenv("HOME")
    faults.fail(pwd, "getpwuid", KeyError("the uid of a container"))
    assert launch_of(["true"], RunOptions(cwd=tmp_path), HERE).command.cwd == str(tmp_path)


def test_a_working_directory_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="has been removed; go to another, or give --cwd"):
        launch_of(["true"], RunOptions(), HERE)


def test_the_machines_and_the_variables_are_passed_on() -> None:
    options = RunOptions(on="mac-1, mac-2,mac-1", environment=["A=1", "B=x=y", "A=2"])
    request = launch_of(["true"], options, HERE)
    assert request.on == ("mac-1", "mac-2")
    assert dict(request.command.variables) == {"A": "2", "B": "x=y"}
    assert launch_of(["true"], RunOptions(on="mac-1,all"), HERE).on == ()


def test_lines_carry_the_name_of_their_machine(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(["mac-1", "studio"], [1, 2])
    screen.show(
        b"0 0 o one\n1 2 o two\x1b[2J\x1b[2\n1 1 e bad\n0 0 o 10%%\r20%%\r\n"
        b"0 0 n it failed\n%d 0 n mac-2 is lost\n9 0 o forged\n" % STARTER
    )
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "mac-1  | one",
        "studio 2 | two�[2",
        "mac-1  | 20%",
        '9 "?"  0 | forged',
    ]
    assert err.splitlines() == [
        "studio 1 | bad",
        "mac-1  | pmesh: rank 0 it failed",
        "pmesh: mac-2 is lost",
    ]


def test_the_colours_of_a_program_are_dropped_whole(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "\x1b[34m│\x1b[0m \x1b[1;38;5;9mloss\x1b[0m \x1b(B0.5\x1b[K\rstep 2 \x1b[32m3\x1b[m\x1b[K"
    )
    Screen(["a"], [1]).show(f"0 0 o {line.partition(chr(13))[0]}\n0 0 o {line}\n".encode())
    assert capsys.readouterr().out.splitlines() == ["a | │ loss 0.5", "a | step 2 3"]


HOSTILE = "\x1b\x9b\x9d\x90\x9c[]P0;m\\\x07\r\t x\u202e"


@given(st.text(st.sampled_from(HOSTILE)))
def test_whatever_a_program_prints_nothing_that_controls_a_terminal_is_left(text: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        Screen(["a"], [1]).show(f"0 0 o {text}\n".encode())
    assert shown.getvalue().replace("\t", " ")[:-1].isprintable()
    assert shown.getvalue().startswith("a | ")


def test_no_name_looks_like_another_or_like_pmesh(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["mac-1", "pmesh: done", "mac-1 0 | x", "mac-1 1", "Mac-1 1 ", "pmesh"]
    Screen([*names], [2, 1, 1, 1, 1, 1]).show(
        b"0 1 o a\n1 0 o b\n2 0 o c\n3 0 o d\n4 0 o e\n5 0 o f\n63 0 o g\n"
    )
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "mac-1 1 | a",
        '1 "pmesh: done" | b',
        '2 "mac-1 0 � x" | c',
        '3 "mac-1 1" | d',
        '4 "Mac-1 1 " | e',
        '5 "pmesh" | f',
        '63 "?" 0 | g',
    ]


def test_on_a_terminal_names_have_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    be_a_terminal(monkeypatch, "stdout")
    Screen(["a", "b"], [1, 1]).show(b"0 0 o x\n1 0 o y\n")
    assert capsys.readouterr().out == "\x1b[36ma\x1b[0m | x\n\x1b[33mb\x1b[0m | y\n"


@pytest.mark.parametrize("command", [["run", "--on", "all", "true"], ["ps"], ["logs", "x"]])
def test_without_an_agent_the_error_says_what_to_type(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o700)
    options = ["--home", str(tmp_path)]
    arguments = (
        [*command, *options] if command[0] != "run" else [*command[:1], *options, *command[1:]]
    )
    assert run(arguments) == 1
    assert "start one with 'pmesh up'" in capsys.readouterr().err


@pytest.fixture
def as_user(faults: Faults) -> None:
    faults.pretend(launches, "is_root", lambda: False)


def test_permission_is_not_said_to_be_given_where_an_agent_of_root_refuses_all_the_same(
    tmp_path: Path, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    faults.instead(launches, "is_root", lambda: True)
    home = ["--home", str(tmp_path / "home")]
    assert run(["allow", "run", *home]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert "type: pmesh allow run --as-root" in shown.err
    assert run(["allow", "run", "--as-root", *home]) == 0
    assert run(["allow", "run", *home]) == 0, "that holds from then on"
    assert run(["allow", "run", "--no", *home]) == 0


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("allowed", [True, False])
def test_up_says_that_an_agent_of_root_refuses_commands_though_allow_run_was_given(
    *,
    root: bool,
    allowed: bool,
    tmp_path: Path,
    faults: Faults,
    capsys: pytest.CaptureFixture[str],
) -> None:
    faults.pretend(launches, "is_root", lambda: root)
    faults.instead(up, "_run_here", lambda _settings: 0)
    assert up.bring_up(tmp_path / "home", {"allow_run": allowed}, detach=False) == 0
    said = "type: pmesh allow run --as-root" in capsys.readouterr().err
    assert said == (root and allowed)


@pytest.mark.usefixtures("as_user")
def test_permission_is_given_and_taken_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--home", str(tmp_path / "home")]
    assert run(["allow", "run", *home]) == 0
    assert "every member of the mesh" in capsys.readouterr().out
    assert run(["allow", "run", "--no", *home]) == 0
    assert "nothing that others ask for" in capsys.readouterr().out
    assert run(["run", "--on", "all", "--restarts", "-1", "true"]) == 2


@pytest.mark.usefixtures("as_user")
def test_permission_is_given_to_node_ids_which_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("PMESH_HOME", str(tmp_path))
    whole = node_text(NodeId(bytes(range(32))))
    with agent_at(socket_path(home_directory()), answer_well):
        assert run(["allow", "run", "--member", "mac-2"]) == 0
    assert capsys.readouterr().out == (
        f"this machine runs what mac-2, whose id is {IDS[1]}, asks for, as the user who runs the "
        "agent\n"
    )
    assert run(["allow", "run", "--member", whole]) == 0  # without an agent
    assert f"what {whole} asks for" in capsys.readouterr().out
    assert load_permission(tmp_path).members == (IDS[1], whole)
    assert run(["allow", "run", "--member", "mac-1"]) == 1
    assert "start one with 'pmesh up'" in capsys.readouterr().err


def test_a_name_is_taken_back_from_its_machine_which_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMESH_HOME", str(tmp_path))
    with agent_at(socket_path(home_directory()), answer_well):
        assert run(["forget", "mac-2"]) == 0
    assert capsys.readouterr().out == (
        f"'mac-2' is no more the name of {IDS[1]}; the next machine that says it has it\n"
    )


@pytest.mark.parametrize("options", [["--sync"], ["--engine", "mpi"], ["--detach"]])
def test_what_means_nothing_on_this_machine_alone_is_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", *options, "--", "true"]) == 2
    assert "without --on only --restarts can be given" in capsys.readouterr().err


def test_a_limit_that_is_no_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--on", "all", "--sync-limit", "much", "true"]) == 2
    assert "--sync-limit must be a number of bytes" in capsys.readouterr().err


IN_THE_BACKGROUND = """
import fcntl, os, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
run = subprocess.Popen(sys.argv[1:], process_group=0)
_, status = os.waitpid(run.pid, os.WUNTRACED)
if os.WIFSTOPPED(status):
    run.kill()
    sys.exit("the terminal has stopped it")
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""A shell that runs its arguments as `ARGUMENTS &`."""


def begin_and_await_input(connection: socket.socket) -> None:
    """The agent of a launch that ends when the program says that there is no input."""
    reader = FrameReader(max_bytes=1 << 20)
    for reply in (LaunchBegan("l", "j", ("mac-1",), (1,), (IDS[0],)), LaunchOver(0)):
        while (message := reader.next_message_untrusted()) is None:
            data = connection.recv(4096)
            if not data:
                return
            reader.receive_data(data)
        request = decode_request_untrusted(message)
        assert isinstance(request, Launch | LaunchInput)
        if isinstance(request, LaunchInput):
            assert request.data == b""
        connection.sendall(frame(encode(reply)))


def test_in_the_background_there_is_no_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("PMESH_HOME", str(tmp_path))
    ours, its = os.openpty()
    with agent_at(socket_path(home_directory()), begin_and_await_input):
        words = ("-m", "pmesh.cli", "run", "--on", "all", "--", "true")
        done = subprocess.run(
            [sys.executable, "-c", IN_THE_BACKGROUND, sys.executable, *words],
            stdin=its,
            capture_output=True,
            text=True,
            start_new_session=True,
            check=False,
        )
    os.close(ours)
    os.close(its)
    assert (done.returncode, done.stderr) == (0, f"runs on mac-1 ({IDS[0][:8]})\n")


async def test_a_launch_that_is_over_while_input_goes_there_ends_with_its_code() -> None:
    ours, its = socket.socketpair()
    with its:
        its.sendall(frame(encode(LaunchOver(3))))
    async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream:
        agent = AgentStream(stream)
        await agent.send(LaunchInput(b""))  # nobody reads it any more
        assert await agent.receive() == LaunchOver(3)
        with pytest.raises(AgentStopped, match="the agent has ended"):
            await agent.receive()
