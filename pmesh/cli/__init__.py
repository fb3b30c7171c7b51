"""Arguments in, text out."""

import os
import sys
from typing import Final

import pmesh
from pmesh.installed import NAMESAKE

_STANDARD_STREAMS: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""In the order of their descriptors, 0 to 2."""


def main() -> None:
    """The `pmesh` command."""
    _replace_closed_streams()
    if "connect" not in dir(pmesh):  # its __init__.py is not ours
        sys.exit(NAMESAKE.format(folder=pmesh.__path__[0]))
    try:
        from pmesh.cli.app import run  # noqa: PLC0415 - 0.3 s, in which Ctrl-C shows no traceback

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130  # 128 + SIGINT, as in shells
    sys.exit(code)


def _replace_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed, as by `pmesh up >&-`.

    Python has None for it. And the next file or socket would get its descriptor, and with that the
    output of whatever the command starts.
    """
    for name, mode in _STANDARD_STREAMS:
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(descriptor, True)  # noqa: FBT003 - the name of the call says it
            setattr(sys, name, open(descriptor, mode, encoding="utf-8"))  # noqa: PTH123, SIM115
