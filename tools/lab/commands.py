"""The command line of a tool that starts agents: how it ends, whatever ends it."""

import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import cyclopts

from tools.lab.net import NetLabError, clean, why_not

Flag = Annotated[bool, cyclopts.Parameter(negative="")]


Lab = Literal["needed", "some", "none"]


class LabError(Exception):
    """A measurement could not be made; says what the programs have printed."""


def run_command(
    function: Callable[..., Any], words: Sequence[str], *, name: str, lab: Lab = "none"
) -> int:
    """Call a function as the words of a command line say; a Ctrl-C ends all that it starts, too.

    Args:
        function: Its parameters are the options, its docstring the help.
        words: What follows the name.
        name: For errors and the help.
        lab: Whether it can't do without network namespaces, may make some, or makes none.

    Returns:
        The exit code.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    app = cyclopts.App(name=name, help_format="plaintext", version_flags=[])
    app.default(function)
    asks = {"--help", "-h"} & {*words}
    may_clean = lab != "none" and not asks
    reason = why_not() if may_clean else None
    if lab == "needed" and reason is not None:
        print(f"{name}: {reason}", file=sys.stderr)
        return 1
    try:
        if may_clean and reason is None:
            clean()  # what a run that was killed has left
        return app(words, result_action="return_int_as_exit_code_else_zero") or 0
    except (LabError, NetLabError, ValueError) as e:
        print(f"{name}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted: {shlex.join(words)}", file=sys.stderr)
        return 130
