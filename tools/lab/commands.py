"""The command line of a tool that starts agents: how it ends, whatever ends it."""

import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import cyclopts

from tools.lab.net import NetLabError, clean, why_not

Flag = Annotated[bool, cyclopts.Parameter(negative="")]


class LabError(Exception):
    """A measurement could not be made; says what the programs have printed."""


def new_app(name: str, text: str | None) -> cyclopts.App:
    return cyclopts.App(name=name, help=text, help_format="plaintext", version_flags=[])


def run_app(
    app: cyclopts.App,
    arguments: Sequence[str] | None,
    *,
    starts: str | None = "run",
    needs_lab: bool = True,
) -> int:
    """Run a command; a Ctrl-C or a kill ends all that was started, too.

    Args:
        app: Has the command.
        arguments: The process's own if None.
        starts: The command that starts hosts; None: whatever is asked for.
        needs_lab: It can't do without network namespaces.

    Returns:
        The exit code.
    """
    name = app.name[0]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    may_clean = starts is None or arguments[:1] == [starts]
    reason = why_not() if may_clean else None
    if needs_lab and reason is not None:
        print(f"{name}: {reason}", file=sys.stderr)
        return 1
    try:
        if may_clean and reason is None:
            clean()  # what a run that was killed has left
        return app(arguments, result_action="return_int_as_exit_code_else_zero") or 0
    except (LabError, NetLabError, ValueError) as e:
        print(f"{name}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted: {shlex.join(arguments)}", file=sys.stderr)
        return 130
