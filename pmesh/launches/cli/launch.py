"""`pmesh run --on`: starts a command on several machines, and shows what all of them print.

`pmesh logs` shows the same later.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

import trio

from pmesh.client.control import check_question
from pmesh.client.session.connection import error_of
from pmesh.core.values import MAX_TRAINERS
from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.session import (
    MAX_REQUEST_BYTES,
    MAX_SESSION_MESSAGE_BYTES,
    Refused,
    SessionMessage,
    encode,
)
from pmesh.core.wire.stream import PART_BYTES
from pmesh.errors import AgentNotRunning, AgentStopped, ConfigError, PmeshError, ProtocolError
from pmesh.home_paths import expand_user, home_directory, path_below, socket_path
from pmesh.ids import MAX_NAME, PRINTABLE, SHORT_ID, path_name
from pmesh.launches.agent.checks import python_version
from pmesh.launches.agent.copies import copy_path
from pmesh.launches.cli.fetch import DEFAULT_LIMIT, check_target, show_fetch, tell_new_files
from pmesh.launches.cli.launches import ask_launches
from pmesh.launches.cli.same_code import digests_of
from pmesh.launches.cli.sync import SendingShown, with_tree
from pmesh.launches.rules.engines import why_not_set
from pmesh.launches.rules.lines import (
    ERROR,
    MACHINE,
    NOTE,
    STARTER,
    OutputLine,
    label_of,
    labels,
    read_lines,
)
from pmesh.launches.wire.messages import (
    LAUNCH_REPLIES,
    MAX_COMMAND_TEXT,
    MAX_COMMAND_WORDS,
    MAX_JOB_NAME,
    MAX_PORTS,
    MAX_RESTARTS,
    MAX_TERM_S,
    MAX_VARIABLES,
    Command,
    FollowLaunch,
    Launch,
    LaunchBegan,
    LaunchInput,
    LaunchInputTaken,
    LaunchLines,
    LaunchOver,
    LaunchReply,
    LaunchSends,
    LaunchTerms,
    SignalLaunch,
    SignalNumber,
    Variable,
)
from pmesh.terminal.lines import complain, complain_of, ending_signals, say
from pmesh.texts import printable, without_escapes

DEFAULT_SYNC_LIMIT: Final = 100 * 1024**2  # code, and not data sets
_COLORS: Final = (36, 33, 35, 32, 34, 96, 93, 95)  # red is for errors
_RECEIVE_BYTES = 64 * 1024
_PATIENCE = 3  # signals: the first asks, the second kills, the third waits no longer


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of `pmesh run --on`."""

    on: str = "all"
    count: int = 0
    per_node: int = 1
    terms: LaunchTerms = field(default_factory=LaunchTerms)
    job: str = ""
    environment: Sequence[str] = ()
    cwd: Path | None = None
    python: str = ""
    module: str = ""
    shell: bool = False
    sync: bool = False
    """Send the working directory first."""
    sync_limit: int = DEFAULT_SYNC_LIMIT
    collect: Path | None = None
    """Where to bring, at the end, what the ranks have written into their copies."""

    @property
    def directory(self) -> Path:
        """The working directory. Raises ConfigError if there is none."""
        cwd = expand_user(self.cwd or Path())
        try:
            return Path(os.path.abspath(cwd))  # noqa: PTH100 - no '..'
        except FileNotFoundError as e:
            raise ConfigError(
                "the directory that you are in has been removed; go to another, or give --cwd"
            ) from e

    @property
    def machines(self) -> tuple[str, ...]:
        """Those that are named; empty for all. Raises ConfigError if `on` names none."""
        names = tuple(dict.fromkeys(name.strip() for name in self.on.split(",") if name.strip()))
        if not names:
            raise ConfigError("--on names no machine; give all, or names such as mac-1,mac-3")
        return () if "all" in names else names


# --- the command


def launch_of(words: Sequence[str], options: RunOptions, environment: Mapping[str, str]) -> Launch:
    """Return what to ask for.

    Args:
        words: The command.
        options: The options.
        environment: Of this process; it says where programs are found.

    Raises:
        ConfigError: An option is not valid, or the command is not there.
    """
    cwd = options.directory
    _check_numbers(options)
    _check_collect(options)
    variables = _variables(options.environment)
    words = _with_python(words, options)
    _check_script(words, cwd)
    program = _find(words[0], cwd, environment)
    version = python_version(program) if is_python(program) else ""
    named = words[0] if "/" not in words[0] and not _is_virtual(program) else _portable(program)
    inner = path_below(cwd, Path(program)) if options.sync else None
    if inner is not None and not _is_virtual(program):
        named = f"./{inner}"
    command = Command(
        words=(named, *words[1:]),
        cwd=_portable(str(cwd)),
        variables=variables,
        python=version,
        digests=digests_of(words[1:], cwd, copied=options.sync),
    )
    request = Launch(
        job=options.job,
        command=command,
        terms=options.terms,
        on=options.machines,
        count=options.count,
        per_node=options.per_node,
    )
    _check_size(request)
    return request


def _check_numbers(options: RunOptions) -> None:
    terms = options.terms
    for option, value, least, most in (
        ("--count", options.count, 0, MAX_TRAINERS),
        ("--per-node", options.per_node, 1, MAX_PORTS),
        ("--restarts", terms.restarts, 0, MAX_RESTARTS),
        ("--grace", terms.grace_s, 0, MAX_TERM_S),
        ("--hang-timeout", terms.hang_timeout_s, 0, MAX_TERM_S),
    ):
        if not least <= value <= most:  # nor is it nan
            raise ConfigError(f"{option} is {value}, but must be from {least} to {most}")
    if len(options.job) > MAX_JOB_NAME or not re.match(PRINTABLE, options.job):
        raise ConfigError(
            f"--job {options.job!r}: the name of a job has at most {MAX_JOB_NAME} characters, and "
            "no line breaks or other control characters"
        )


def _check_collect(options: RunOptions) -> None:
    if options.collect is None:
        return
    if not options.sync or options.terms.detach:
        raise ConfigError(
            "--collect brings files at the end from the copies of --sync: give --sync, and not "
            "--detach; 'pmesh fetch' brings them later"
        )
    check_target(expand_user(options.collect))


def _check_script(words: Sequence[str], cwd: Path) -> None:
    """Refuse a script that is not there: it would fail on each machine, again and again."""
    script = words[1] if len(words) > 1 and is_python(words[0]) else "-"
    if not script.startswith("-") and not os.path.exists(cwd / expand_user(Path(script))):  # noqa: PTH110 - False for any name
        raise ConfigError(f"there is no {script!r} in {cwd}; give the path of the script, or --cwd")


def _check_size(request: Launch) -> None:
    command = request.command
    texts = [*command.words, command.cwd, *(value for _, value in command.variables)]
    if any("\0" in text for text in texts):
        raise ConfigError("an argument can't contain a null character")
    try:
        nbytes = len(encode(request))
    except UnicodeEncodeError as e:
        raise ConfigError("an argument is not valid UTF-8; other machines can't get it") from e
    too_many = len(command.words) > MAX_COMMAND_WORDS or len(command.variables) > MAX_VARIABLES
    if nbytes > MAX_REQUEST_BYTES or too_many or max(map(len, texts)) > MAX_COMMAND_TEXT:
        raise ConfigError(
            f"the command is too long: at most {MAX_COMMAND_WORDS} words, {MAX_VARIABLES} --env, "
            f"and {MAX_REQUEST_BYTES // 1024} KiB in all; put it into a file"
        )
    if any(len(name) > MAX_NAME for name in request.on):
        raise ConfigError(f"--on: a machine's name has at most {MAX_NAME} characters")


def _variables(settings: Sequence[str]) -> tuple[Variable, ...]:
    variables: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"--env {setting!r} is not NAME=VALUE")
        variables[name] = value
    refusal = why_not_set(variables)
    if refusal:
        raise ConfigError(f"--env: {refusal}")
    return tuple(Variable(name, value) for name, value in variables.items())


def _with_python(words: Sequence[str], options: RunOptions) -> tuple[str, ...]:
    if not words and not options.module:
        raise ConfigError(
            "there is no command; type for example: pmesh run --on all -- python train.py"
        )
    if options.shell:
        return ("/bin/sh", "-c", shlex.join(words) if len(words) > 1 else "".join(words))
    python = options.python or sys.executable
    if options.module:
        return (python, "-m", options.module, *words)
    if words[0].endswith(".py"):
        return (python, *words)
    if options.python and is_python(words[0]):
        return (options.python, *words[1:])
    return tuple(words)


def is_python(program: str) -> bool:
    """Return True for the name of a Python.

    >>> is_python("/usr/bin/python3.13"), is_python("pytest")
    (True, False)
    """
    return re.fullmatch(r"python[0-9.]*", Path(program).name) is not None


def _find(word: str, cwd: Path, environment: Mapping[str, str]) -> str:
    path = str(cwd / expand_user(Path(word))) if "/" in word else word
    found = shutil.which(path, path=environment.get("PATH", os.defpath))
    if found is None:
        raise ConfigError(f"there is no program {word!r} here; give the path of one")
    return str(cwd / found)


def _is_virtual(program: str) -> bool:
    """Return True for a program of a virtual environment: the same one must be used elsewhere."""
    return (Path(program).parent.parent / "pyvenv.cfg").exists()


def _portable(path: str) -> str:
    """Write the home directory as ~: users may have other names on other machines."""
    home = os.path.expanduser("~")  # noqa: PTH111 - "~" where the system knows none
    return f"~{path[len(home) :]}" if path.startswith(f"{home}/") and home != "/" else path


# --- the session


class AgentStream:
    """Whole messages to and from the agent, in a trio program."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._reader = FrameReader(max_bytes=MAX_SESSION_MESSAGE_BYTES)
        self._sending = trio.Lock()

    async def send(self, request: SessionMessage) -> None:
        """Send a request. If the agent reads no more, `receive` returns what it said last."""
        async with self._sending:
            with contextlib.suppress(trio.BrokenResourceError):
                await self._stream.send_all(frame(encode(request)))

    async def receive(self) -> LaunchReply:
        """Return the next reply. Raises the PmeshError with which the agent refuses."""
        while (message := self._reader.next_message_untrusted()) is None:
            try:
                data = await self._stream.receive_some(_RECEIVE_BYTES)
            except trio.BrokenResourceError as e:
                raise _agent_is_gone() from e
            if not data:
                raise _agent_is_gone()
            self._reader.receive_data(data)
        reply = LAUNCH_REPLIES.decode_untrusted(message)
        if isinstance(reply, Refused):
            raise error_of(reply.verdict)
        return reply


def _agent_is_gone() -> AgentStopped:
    return AgentStopped("the agent has ended, and with it all that was not detached; 'pmesh up'")


async def _open(home: Path) -> trio.SocketStream:
    path = socket_path(home)
    try:
        return await trio.open_unix_socket(path)
    except OSError as e:
        raise AgentNotRunning(
            f"no agent listens at {path} ({e.strerror or e}); start one with 'pmesh up'"
        ) from e


def run_launch(home: Path | None, request: Launch, options: RunOptions) -> int:
    """Start the command everywhere, show the output, and return the exit code."""
    directory = home_directory(home)
    if options.sync:
        ask_launches(directory)  # without an agent there is nothing to read files for
        most_bytes = options.sync_limit
        request = with_tree(request, directory, options.directory, most_bytes=most_bytes)
    begun = list[LaunchBegan]()
    code = trio.run(_converse, directory, request, begun)
    if not begun or not options.sync or options.terms.detach:
        return code
    if options.collect is None:
        tell_new_files(directory, begun[0].launch)
        return code
    try:
        lacking = show_fetch(home, begun[0].launch, options.collect, most_bytes=DEFAULT_LIMIT)
    except PmeshError as e:
        if not code:
            raise
        complain_of(e)
        return code
    return code or lacking


def show_log(home: Path | None, launch: str, *, follow: bool) -> int:
    """Print the output of a launch; with `follow`, until it ends."""
    request = FollowLaunch(launch, follow)
    check_question(request)
    return trio.run(_converse, home_directory(home), request, list[LaunchBegan]())


async def _converse(home: Path, request: Launch | FollowLaunch, begun: list[LaunchBegan]) -> int:
    attends = isinstance(request, Launch) and not request.terms.detach
    codes, signals = list[int](), list[int]()
    async with await _open(home) as stream:
        agent = AgentStream(stream)
        await agent.send(request)
        taken_in, taken = trio.open_memory_channel[None](1)
        async with trio.open_nursery() as nursery:
            if attends:
                await nursery.start(_pass_signals_on, agent, nursery, signals)
            began = await _await_begin(agent)
            begun.append(began)
            if isinstance(request, Launch):
                _tell_begin(home, request, began)
            if attends:
                nursery.start_soon(_pass_input_on, agent, taken)
            if isinstance(request, Launch) and request.terms.detach:
                codes.append(0)
            else:
                codes.append(await _show(agent, Screen(began.names, began.counts), taken_in))
            nursery.cancel_scope.cancel()
    return codes[0] if codes else 128 + signals[0]


async def _await_begin(agent: AgentStream) -> LaunchBegan:
    """Wait until all machines have agreed, and show how they get their files meanwhile."""
    with contextlib.closing(SendingShown()) as sending:
        while True:
            match reply := await agent.receive():
                case LaunchBegan():
                    return reply
                case LaunchSends(machines):
                    sending.show(machines)
                case _:
                    raise _out_of_turn(reply)


def _tell_begin(home: Path, request: Launch, began: LaunchBegan) -> None:
    tree, terms = request.command.tree, request.terms
    where = [f"{name} ({id_[:SHORT_ID]})" for name, id_ in zip(began.names, began.ids, strict=True)]
    complain(f"runs on {', '.join(where)}")
    if tree is not None:
        copy = copy_path(home, path_name(began.launch), tree)
        if copy.exists():  # not where the launch runs only on others, or was interrupted
            complain(f"each machine runs in a copy of the directory, here: {copy}")
    if terms.detach:
        say(began.launch)
    if terms.engine != "pmesh":
        complain(
            f"--engine {terms.engine}: its data are not encrypted, and go around pmesh's own "
            "connections"
        )


async def _show(agent: AgentStream, screen: "Screen", taken: trio.MemorySendChannel[None]) -> int:
    """Show the output, and return the exit code; 0 if the launch goes on."""
    while True:
        match reply := await agent.receive():
            case LaunchLines(data):
                await trio.to_thread.run_sync(screen.show, data, abandon_on_cancel=True)
            case LaunchInputTaken():
                taken.send_nowait(None)
            case LaunchSends():  # it had been on its way
                pass
            case LaunchOver(code):
                return max(code, 0)
            case _:
                raise _out_of_turn(reply)


def _out_of_turn(reply: LaunchReply) -> ProtocolError:
    return ProtocolError(f"the agent sent {type(reply).__name__} during a launch")


async def _pass_signals_on(
    agent: AgentStream,
    nursery: trio.Nursery,
    came: list[int],
    task_status: trio.TaskStatus[None],
) -> None:
    with trio.open_signal_receiver(*ending_signals()) as signals:
        task_status.started()
        async for number in signals:
            came.append(number)
            if len(came) == _PATIENCE:
                nursery.cancel_scope.cancel()
            await agent.send(SignalLaunch(_number_of(number)))


def _number_of(number: int) -> SignalNumber:
    return 2 if number == 2 else 15 if number == 15 else 1  # noqa: PLR2004 - SIGINT, SIGTERM


async def _pass_input_on(agent: AgentStream, taken: trio.MemoryReceiveChannel[None]) -> None:
    """Read standard input in a thread: a terminal that others use, too, must stay as it is.

    In the background there is none: the terminal would stop this program for reading.
    """
    before = signal.signal(signal.SIGTTIN, signal.SIG_IGN)
    try:
        while True:
            try:
                data = await trio.to_thread.run_sync(
                    os.read, sys.stdin.fileno(), PART_BYTES, abandon_on_cancel=True
                )
            except (OSError, ValueError):  # it is closed, or the terminal's, which others have
                data = b""
            await agent.send(LaunchInput(data))
            if not data:
                return
            await taken.receive()
    finally:
        signal.signal(signal.SIGTTIN, before)


# --- the output


class Screen:
    """Prints lines with the names of machines, each in its colour."""

    def __init__(self, names: Sequence[str], counts: Sequence[int]) -> None:
        self._names = labels(names)
        self._width = max(map(len, self._names), default=0)
        self._counts = counts
        self._colored = {
            stream: stream.isatty() and not os.environ.get("NO_COLOR")
            for stream in (sys.stdout, sys.stderr)
        }

    def show(self, data: bytes) -> None:
        """Write whole lines to standard output and standard error."""
        texts: dict[TextIO, list[str]] = {}
        for line in read_lines(data):
            stream = sys.stdout if line.kind not in {ERROR, NOTE} else sys.stderr
            texts.setdefault(stream, []).append(self._format(line, stream))
        for stream, lines in texts.items():
            stream.write("".join(lines))
            stream.flush()

    def _format(self, line: OutputLine, stream: TextIO) -> str:
        text = without_escapes(line.text.decode(errors="replace"))
        text = _printable(text.rstrip("\r").rpartition("\r")[2])
        if line.seat == STARTER:
            return f"pmesh: {text}\n"
        known = 0 <= line.seat < len(self._names)  # else a log has lines that pmesh did not write
        if line.kind == NOTE:
            text = f"pmesh: {text}" if line.rank == MACHINE else f"pmesh: rank {line.rank} {text}"
        name = self._names[line.seat] if known else label_of(line.seat, "?")
        name = name.ljust(self._width)
        if self._colored[stream]:
            name = f"\x1b[{_COLORS[line.seat % len(_COLORS)]}m{name}\x1b[0m"
        rank = f"{line.rank} " if not known or self._counts[line.seat] > 1 else ""
        return f"{name} {rank}| {text}\n"


def _printable(text: str) -> str:
    r"""Replace what could control the terminal, but for tabs.

    >>> _printable("a\tb\x1b[2J")
    'a\tb�[2J'
    """
    return "\t".join(map(printable, text.split("\t")))
