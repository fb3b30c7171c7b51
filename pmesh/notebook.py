"""`%load_ext pmesh.notebook`: a cell that begins with `%%pmesh` runs on all machines."""

import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Protocol

from pmesh.errors import RunError
from pmesh.terminal.lines import say


class _IPython(Protocol):
    def register_magic_function(self, func: object, magic_kind: str, magic_name: str) -> None: ...


def load_ipython_extension(ipython: _IPython) -> None:
    """Make the magic known; IPython calls this for `%load_ext pmesh.notebook`."""
    ipython.register_magic_function(run_cell, "cell", "pmesh")


def run_cell(line: str, cell: str) -> None:
    """Run the cell as a program of its own on all machines, and print what it prints.

    It is `pmesh run --on all --sync` from an empty directory: neither the notebook's variables nor
    its files are there.

    Args:
        line: options of `pmesh run`, such as `--on mac-1,mac-2 -n 4`.
        cell: the program.

    Raises:
        RunError: the program has failed, or could not be started; what it said stands above.
        KeyboardInterrupt: the cell was interrupted; the program has ended everywhere.
    """
    options = shlex.split(line)
    if not any(option.partition("=")[0] == "--on" for option in options):
        options = ["--on", "all", *options]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "cell.py").write_text(cell, encoding="utf-8")
        command = [sys.executable, "-m", "pmesh.cli", "run", "--sync", *options, "--"]
        with subprocess.Popen(  # noqa: S603 - our own program
            [*command, "python", "cell.py"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # an interrupt is this process's, which passes it on
        ) as process:
            assert process.stdout is not None  # noqa: S101 - it was started with a pipe
            try:
                for text in process.stdout:
                    say(text.rstrip("\n"))
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
                say(*process.stdout.read().splitlines())
                raise
    if process.returncode:
        raise RunError(f"the cell has ended with {process.returncode}; what it said stands above")
