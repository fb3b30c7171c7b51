"""The command line of a tool that starts agents: how it ends, whatever ends it."""

import shlex
import signal
import sys
from collections.abc import Sequence

import cyclopts

from tools.bench_peers.systems import BenchError
from tools.virtual_lan import NetLabError, clean, why_not


def run_commands(app: cyclopts.App, name: str, arguments: Sequence[str] | None) -> int:
    """Run a command; a Ctrl-C or a kill ends all that was started, too.

    Args:
        app: has the command.
        name: of the tool, for messages.
        arguments: the process's own if None.

    Returns:
        The exit code.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if arguments[:1] == ["run"] and why_not() is None:
            clean()  # what a run that was killed has left
        app(arguments, result_action="return_int_as_exit_code_else_zero")
    except (BenchError, NetLabError, ValueError) as e:
        print(f"{name}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted: {shlex.join(arguments)}", file=sys.stderr)
        return 130
    return 0
