"""`pmesh ps`, `stop` and `allow`: launches on this machine, and who may start them."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from pmesh.agent.home import open_home
from pmesh.agent.launches.permission import Permission, load_permission, store_permission
from pmesh.cli.rows import Rows, output
from pmesh.cli.terminal import complain, say
from pmesh.client.control import ask_hosts, ask_launches, ask_machines, end_launch, forget_name
from pmesh.core.wire.launches import AskHosts, LaunchRow
from pmesh.ids import node_from_text
from pmesh.paths import home_directory
from pmesh.texts import printable


def show_hosts(home: Path | None, request: AskHosts, command: Sequence[str]) -> int:
    """Print a host file for mpirun of Open MPI; how to give it the command, on standard error."""
    hosts = ask_hosts(home_directory(home), request)
    say(*(f"{host.host} slots={host.ranks}" for host in hosts))
    words = shlex.join(command or ("COMMAND",))
    complain(f"save these lines as 'hosts', then type: mpirun --hostfile hosts {words}")
    return 0


def show_launches(home: Path | None) -> int:
    """Print a row for each launch that this agent has started or runs."""
    rows = [_row(row) for row in ask_launches(home_directory(home))]
    headers = ("launch", "job", "state", "age", "started on", "machines", "command")
    output().print(Rows(headers, rows))
    return 0


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
    say(f"launch {end_launch(home_directory(home), launch)} is being ended")
    return 0


def allow_run(home: Path | None, names: tuple[str, ...], *, as_root: bool, no: bool) -> int:
    """Write who may run commands here; it counts from the next request on."""
    directory = open_home(home_directory(home))
    before = load_permission(directory)
    if no:
        store_permission(directory, Permission())
        say("this machine runs nothing that others ask for; what runs already goes on")
        return 0
    nodes = names if all(map(_is_id, names)) else ask_machines(directory, names)
    permission = Permission(
        everyone=not names,
        members=tuple(dict.fromkeys((*before.members, *nodes))) if names else (),
        as_root=as_root or before.as_root,
    )
    store_permission(directory, permission)
    for whom in _described(names, nodes) if names else ["every member of the mesh"]:
        say(f"this machine runs what {whom} asks for, as the user who runs the agent")
    return 0


def forget(home: Path | None, name: str) -> int:
    """Let another machine have a name."""
    node = forget_name(home_directory(home), name)
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
