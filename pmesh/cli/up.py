"""`pmesh up`: starts an agent in the foreground or the background, and sets up its logs."""

import functools
import gc
import io
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TextIO

import structlog
import trio

from pmesh.agent.config import AgentSettings, Listen, as_environment, load_settings
from pmesh.agent.home import (
    NODE_KEY_BYTES,
    LogFile,
    hold_home,
    load_node_key,
    open_home,
    open_own_file,
)
from pmesh.agent.host_port import host_port_text
from pmesh.agent.limits import raise_open_files
from pmesh.agent.log_level import LogLevel
from pmesh.agent.schema import decode_status, describe_other_mesh
from pmesh.cli.keys import find_mesh_key, has_mesh_key
from pmesh.client.control import ask_status
from pmesh.core.identity.keys import MeshKey, NodeKey
from pmesh.errors import AgentAlreadyRunning, AgentNotRunning, AgentStopped, ConfigError
from pmesh.home_paths import LOG_NAME, home_directory, socket_path
from pmesh.launches.cli.launches import complain_of_root
from pmesh.terminal.lines import announce, complain, dropping_lines, ending_signals, say
from pmesh.texts import printable

START_TIMEOUT_S = 60.0  # imports take 5 s on a slow, cold disk, and 27 on a busy machine
FIND_OTHERS_S = 2.0  # mDNS takes about a second
_POLL_INTERVAL_S = 0.05


def start_detached(command: Sequence[str], *, environment: Mapping[str, str], home: Path) -> int:
    """Start the command in its own session, and return 0 when it answers as this home's agent.

    Its output is appended to the log. If it fails to start, print its output and return its exit
    code.

    Raises:
        AgentStopped: It neither answered nor ended, and was killed.
        ConfigError: The log can't be written, or is not this user's own.
    """
    log = home / LOG_NAME
    descriptor = open_own_file(log, os.O_APPEND)
    with open(descriptor, "wb") as output:  # noqa: PTH123 - a descriptor has no path
        begin = os.fstat(descriptor).st_size
        process = subprocess.Popen(  # noqa: S603 - our own program
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=home,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = log.read_bytes()[begin:].decode(errors="replace")
            for line in said.splitlines():
                complain(line)
            if not said:  # on a full disk not even the reason can be written
                complain(f"the agent ended and could not log why in {log}; 'pmesh up' shows it")
            return process.returncode or 1  # an agent that ends with 0 has not started either
        if _answers(home, process.pid):
            process.returncode = 0  # Popen would warn that nobody waits for the process
            say(f"The agent is running: pid {process.pid}, log {log}")
            return 0
        time.sleep(_POLL_INTERVAL_S)
    process.kill()
    process.wait()
    raise AgentStopped(f"the agent did not start within {START_TIMEOUT_S:g} s; see {log}")


def _answers(home: Path, pid: int) -> bool:
    """Return False also if another agent answers: then this one ends, and says why."""
    try:
        return decode_status(ask_status(home, timeout_s=1.0)).pid == pid
    except (AgentNotRunning, AgentStopped):
        return False


def bring_up(home: Path | None, flags: Mapping[str, object], *, detach: bool) -> int:
    """Run the agent, or start one in the background, and return the exit code."""
    directory = open_home(home_directory(home))
    settings = load_settings(
        directory, flags=flags, environment=os.environ, host_name=socket.gethostname()
    )
    check_listen(settings.listen)
    _check_interfaces((*settings.interfaces, *settings.not_interfaces))
    if settings.allow_run:
        complain_of_root(directory)
    try:
        return _start_in_background(settings) if detach else _run_here(settings)
    except AgentAlreadyRunning as e:
        if not flags.get("allow_run"):
            raise
        hint = "or let it run what others ask for: pmesh allow run"
        raise AgentAlreadyRunning(f"{e}; {hint}") from e


def check_listen(listen: Listen) -> None:
    """Raise ConfigError for another machine's address, before any key is made."""
    if not listen.host:
        return
    try:
        family, *_, name = socket.getaddrinfo(listen.host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(name)
    except OSError as e:
        where = host_port_text(*listen)
        raise ConfigError(
            f"can't listen at {where}: {e.strerror}; --listen must be an address of this machine"
        ) from e


def _check_interfaces(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that no interface of this machine has."""
    known = sorted(name for _, name in socket.if_nameindex())
    for name in names:
        if name not in known:
            raise ConfigError(
                f"this machine has no network interface {name!r}; it has {', '.join(known)}"
            )


def _run_here(settings: AgentSettings) -> int:
    from pmesh.agent.run import run_agent  # noqa: PLC0415 - 0.3 s that other commands don't need

    complaint = raise_open_files()
    if complaint is not None:
        complain(complaint)
    log = dropping_lines(sys.stderr, LogFile(settings.home / LOG_NAME).rotate_if_full)
    set_up_logs(level=settings.log_level, as_json=settings.log_json, stream=log)
    with hold_home(settings.home):
        mesh_key, node_key = _keys(settings)
        # Modules live for as long as the agent: to look through them all would hold up the event
        # loop for 50 ms in each full collection.
        gc.freeze()
        return trio.run(
            run_until_signal, functools.partial(run_agent, settings, mesh_key, node_key, announce)
        )


def _start_in_background(settings: AgentSettings) -> int:
    with hold_home(settings.home):  # if an agent runs already, fail here and not in a log
        is_new = not has_mesh_key(settings)
        _keys(settings)  # say here that a mesh begins, and not in a log
    socket_path(settings.home)  # a file that is not ours is refused here, too
    others = {key: value for key, value in os.environ.items() if not key.startswith("PMESH_")}
    code = start_detached(
        [sys.executable, "-m", "pmesh.cli", "up"],
        environment=others | as_environment(settings),
        home=settings.home,
    )
    if is_new and code == 0:
        say_of_other_mesh(settings.home, settings.name)
    return code


def say_of_other_mesh(home: Path, own_name: str) -> None:
    """Who has just begun a new mesh may have meant to join one: say so if there is one here."""
    deadline = time.monotonic() + FIND_OTHERS_S
    while time.monotonic() < deadline:
        for peer in decode_status(ask_status(home)).peers:
            if peer.state == "other_mesh_key":
                complain(describe_other_mesh(peer, own_name=own_name))
                return
        time.sleep(_POLL_INTERVAL_S)


def _keys(settings: AgentSettings) -> tuple[MeshKey, NodeKey]:
    entropy = secrets.token_bytes(NODE_KEY_BYTES)
    return find_mesh_key(settings), load_node_key(settings.home, entropy=entropy)


async def run_until_signal(agent: Callable[[], Awaitable[None]]) -> int:
    """Run the agent until it ends, or cancel it at the first signal; return the exit code.

    The second signal meets the default handlers, so that it ends a process that hangs.
    """
    code = 0

    async def await_signal(task_status: trio.TaskStatus[None]) -> None:
        nonlocal code
        with trio.open_signal_receiver(*ending_signals()) as signals:
            task_status.started()
            number = await anext(aiter(signals))
        code = 128 + number if number == signal.SIGINT else 0
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        await nursery.start(await_signal)
        await agent()
        nursery.cancel_scope.cancel()
    return code


MOST_LINES: Final = 30  # of one kind in a minute
THROTTLE_S: Final = 60.0
MAX_KINDS: Final = 256

_LEVELS: Final[Mapping[LogLevel, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def set_up_logs(*, level: LogLevel, as_json: bool, stream: TextIO) -> None:
    """Send structlog's events, and the logs of libraries, to the stream.

    Libraries log from `warning` up, unless `level` is higher: zeroconf's `info` is not useful.
    """
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _printable_values,
    ]
    colors = stream.isatty() and not os.environ.get("NO_COLOR")  # no-color.org
    renderer = _renderer(as_json=as_json, colors=colors)
    last: list[structlog.typing.Processor] = [*_exceptions(as_json=as_json), renderer]
    structlog.configure(
        processors=[Throttle(clock=time.monotonic), *shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,  # tests set up more than once; no logger is on a hot path
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(_LEVELS[level], logging.WARNING), force=True)
    zeroconf = logging.getLogger("zeroconf")
    zeroconf.setLevel(logging.NOTSET)  # its import sets a level
    zeroconf.addFilter(_drop_traceback)


def _drop_traceback(record: logging.LogRecord) -> bool:
    """An interface that has lost its address is no error in the code, and the text names it."""
    record.exc_info = None
    return True


class Throttle:
    """Drops lines of one kind beyond thirty a minute: a peer must not fill the disk.

    The first line of the next minute says how many were dropped.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        """`clock` is monotonic, in seconds."""
        self._clock = clock
        self._lines: OrderedDict[str, tuple[float, int]] = OrderedDict()  # since when, how many

    def __call__(
        self, logger: object, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """Process an event of structlog. Raises DropEvent."""
        del logger, method
        kind, now = str(event.get("event")), self._clock()
        since, count = self._lines.pop(kind, (now, 0))
        if now - since >= THROTTLE_S:
            if count > MOST_LINES:
                event["dropped"] = count - MOST_LINES
            since, count = now, 0
        self._lines[kind] = since, count + 1
        if len(self._lines) > MAX_KINDS:
            self._lines.popitem(last=False)
        if count >= MOST_LINES:
            raise structlog.DropEvent
        return event


def _renderer(*, as_json: bool, colors: bool) -> structlog.typing.Processor:
    if as_json:
        return structlog.processors.JSONRenderer()
    return structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_write_traceback)


def _printable_values(
    logger: object, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Process an event of structlog: reasons and names come from other machines."""
    del logger, method
    return {k: printable(value) if isinstance(value, str) else value for k, value in event.items()}


def _write_traceback(stream: TextIO, error: structlog.typing.ExcInfo) -> None:
    """Write a traceback, indented: no line of its message can look like a line of the log."""
    whole = io.StringIO()
    structlog.dev.plain_traceback(whole, error)
    stream.writelines(
        f"\n    {printable(line)}" for line in whole.getvalue().strip("\n").split("\n")
    )


def _exceptions(*, as_json: bool) -> list[structlog.typing.Processor]:
    """JSON carries a traceback as data; the console renderer formats it itself.

    Neither shows the values of variables, as both would by default: some are keys.
    """
    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(tracebacks)] if as_json else []
