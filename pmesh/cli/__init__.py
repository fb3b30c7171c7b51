"""Arguments in, text out."""

import sys

import pmesh
from pmesh.installed import NAMESAKE


def main() -> None:
    """The `pmesh` command."""
    if "connect" not in dir(pmesh):  # its __init__.py is not ours
        sys.exit(NAMESAKE.format(folder=pmesh.__path__[0]))
    try:
        from pmesh.cli.app import run  # noqa: PLC0415 - 0.3 s, in which Ctrl-C shows no traceback

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130  # 128 + SIGINT, as in shells
    sys.exit(code)
