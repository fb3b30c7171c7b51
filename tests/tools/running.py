"""`python -m tools run`, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start_tool(*words: str) -> subprocess.Popen[str]:
    """Start the tool or row; what it says goes to `stdout`, errors too."""
    return subprocess.Popen(
        [sys.executable, "-m", "tools", "run", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_tool(*words: str, within_s: float) -> tuple[int, str]:
    """Return the exit code of the tool or row, and all that it has said."""
    with start_tool(*words) as process:
        try:
            output, _ = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, output
