"""Arguments in, text out."""

import sys


def main() -> None:
    """The `pmesh` command."""
    try:
        from pmesh.cli.app import run  # noqa: PLC0415 - 0.3 s, in which Ctrl-C shows no traceback

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130  # 128 + SIGINT, as in shells
    sys.exit(code)
