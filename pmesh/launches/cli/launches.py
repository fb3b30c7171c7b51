"""`pmesh ps`, `stop` and `allow`: launches on this machine, and who may start them."""

import os
import shlex
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from pmesh.agent.home import open_home
from pmesh.client.control import ask, await_reply
from pmesh.client.session.connection import AgentConnection
from pmesh.core.wire.control import AskMachines, ForgetName, Machines
from pmesh.errors import ConfigError
from pmesh.home_paths import home_directory
from pmesh.ids import node_from_text
from pmesh.launches.agent.permission import Permission, load_permission, store_permission
from pmesh.launches.wire.messages import (
    LAUNCH_REPLIES,
    AskHosts,
    AskLaunches,
    EndLaunch,
    Hosts,
    LaunchEnding,
    LaunchRow,
    LaunchRows,
)
from pmesh.terminal.lines import complain, say
from pmesh.terminal.rows import Rows, output
from pmesh.texts import printable


def show_hosts(home: Path | None, request: AskHosts, command: Sequence[str]) -> int:
    """Print a host file for mpirun of Open MPI; how to give it the command, on standard error."""
    hosts = ask(home_directory(home), request, Hosts, replies=LAUNCH_REPLIES).hosts
    say(*(f"{host.host} slots={host.ranks}" for host in hosts))
    words = shlex.join(command or ("COMMAND",))
    complain(f"save these lines as 'hosts', then type: mpirun --hostfile hosts {words}")
    return 0


OVER: Final = "over"
SHOWN: Final = 10  # with the headers half of the smallest terminal
_HEADERS: Final = ("launch", "job", "state", "age", "machines", "command")
_MOST_CELLS: Final = (24, 12, 10, 6, 15, 500)
_GAP: Final = 2


def ask_launches(home: Path, *, timeout_s: float = 5.0) -> tuple[LaunchRow, ...]:
    """Return the launches that the agent of this home has started or runs, the latest first.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or stayed silent for `timeout_s`.
    """
    rows: list[LaunchRow] = []
    with closing(AgentConnection(home, LAUNCH_REPLIES, silence_s=timeout_s)) as connection:
        connection.send(AskLaunches())
        while some := await_reply(connection, LaunchRows).rows:
            rows += some
    return tuple(rows)


def show_launches(home: Path | None, *, whole: bool) -> int:
    """Print the latest launches that this agent has started or runs, and all that run."""
    rows = sorted(ask_launches(home_directory(home)), key=lambda row: -row.age_s)  # newest last
    console = output()
    if whole:
        headers = ("launch", "job", "state", "age", "started on", "machines", "command")
        console.print(Rows(headers, [_row(row) for row in rows]))
        return 0
    latest = [row for n, row in enumerate(rows) if n >= len(rows) - SHOWN or row.state != OVER]
    console.print(_one_line_each(latest, width=console.width if console.is_terminal else None))
    if len(latest) < len(rows):
        console.print(Text(f"{len(rows) - len(latest)} older ones: pmesh ps --all", "dim"))
    return 0


def _one_line_each(rows: Sequence[LaunchRow], *, width: int | None) -> Table:
    """Return a table whose cells are cut to fit this width: `--all` shows the whole ones."""
    lines = [_HEADERS, *(tuple(map(printable, _texts(row))) for row in rows)]
    if width is not None:
        lines = [tuple(map(_cut, line, _MOST_CELLS)) for line in lines]
        *others, _ = (max(map(cell_len, column)) for column in zip(*lines, strict=True))
        room = max(width - sum(others) - _GAP * len(others), cell_len(_HEADERS[-1]))
        lines = [(*line[:-1], _cut(line[-1], room)) for line in lines]
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, show_header=False)
    for number, line in enumerate(lines):
        table.add_row(*(Text(text, "" if number else "dim") for text in line))
    return table


def _cut(text: str, cells: int) -> str:
    return text if cell_len(text) <= cells else f"{set_cell_size(text, cells - 1).rstrip()}…"


def _texts(row: LaunchRow) -> tuple[str, ...]:
    job = "" if row.job == row.launch else row.job
    machines = ", ".join(row.machines)
    return row.launch, job, _state(row), _age(row.age_s), machines, row.command


def _state(row: LaunchRow) -> str:
    if row.state != OVER:
        return row.state
    return "ended" if not row.code else f"failed: {row.code}"


def _row(row: LaunchRow) -> tuple[Text, ...]:
    state = row.state if row.code is None else f"{row.state}, exit code {row.code}"
    where = row.starter + (" (this one)" if row.here else "")
    machines = ", ".join(row.machines)
    texts = (row.launch, row.job, state, _age(row.age_s), where, machines, row.command)
    return tuple(Text(printable(text)) for text in texts)


def _age(seconds: float) -> str:
    """Return a time for a person.

    >>> _age(59.4), _age(61), _age(7300)
    ('59 s', '1 min', '2 h')
    """
    for unit, least in (("h", 3600), ("min", 60)):
        if seconds >= least:
            return f"{int(seconds // least)} {unit}"
    return f"{int(seconds)} s"


def stop_launch(home: Path | None, launch: str) -> int:
    """End a launch everywhere."""
    request = EndLaunch(launch)
    ending = ask(home_directory(home), request, LaunchEnding, replies=LAUNCH_REPLIES)
    say(f"launch {ending.launch} is being ended")
    return 0


def is_root() -> bool:
    return os.geteuid() == 0


def allow_run(home: Path | None, names: tuple[str, ...], *, as_root: bool, no: bool) -> int:
    """Write who may run commands here; it counts from the next request on."""
    directory = open_home(home_directory(home))
    before = load_permission(directory)
    if no:
        store_permission(directory, Permission())
        say("this machine runs nothing that others ask for; what runs already goes on")
        return 0
    if is_root() and not (as_root or before.as_root):
        raise ConfigError(
            "you are root, and an agent of root refuses all commands: run 'pmesh up' and this as "
            "another user, or type: pmesh allow run --as-root"
        )
    nodes = names
    if not all(map(_is_id, names)):
        nodes = ask(directory, AskMachines(names), Machines).ids
    permission = Permission(
        everyone=not names,
        members=tuple(dict.fromkeys((*before.members, *nodes))) if names else (),
        as_root=as_root or before.as_root,
    )
    store_permission(directory, permission)
    for whom in _described(names, nodes) if names else ["every member of the mesh"]:
        say(f"this machine runs what {whom} asks for, as the user who runs the agent")
    return 0


def complain_of_root(home: Path) -> None:
    """Say that an agent of root runs nothing for others, though '--allow-run' was given."""
    if is_root() and not load_permission(home).as_root:
        complain(
            "--allow-run: you are root, and an agent of root refuses the commands of others: run "
            "'pmesh up' as another user, or type: pmesh allow run --as-root"
        )


def forget(home: Path | None, name: str) -> int:
    """Let another machine have a name."""
    (node,) = ask(home_directory(home), ForgetName(name), Machines).ids
    say(f"{name!r} is no more the name of {node}; the next machine that says it has it")
    return 0


def _described(names: Sequence[str], nodes: Sequence[str]) -> list[str]:
    return [
        node if node.startswith(name) else f"{name}, whose id is {node},"
        for name, node in zip(names, nodes, strict=True)
    ]


def _is_id(text: str) -> bool:
    try:
        node_from_text(text)
    except ValueError:
        return False
    return True
