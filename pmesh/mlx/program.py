"""Runs a program for MLX over a mesh. `pmesh mlx` executes this module.

python -m pmesh.mlx.program script|module|code TARGET ARGUMENT...
"""

import os
import runpy
import sys
from collections.abc import Sequence

from pmesh.mlx import patches
from pmesh.mlx.groups import leave


def run(kind: str, target: str, arguments: Sequence[str]) -> None:
    """Run a program as `__main__`, as Python itself does, and leave the job when it ends.

    If the program raises an error or exits with a code other than 0, the other ranks see a crash.
    """
    patches.apply()
    try:
        _run(kind, target, arguments)
    except SystemExit as e:
        leave(crashed=e if e.code else None)
        raise
    except BaseException as e:
        leave(crashed=e)
        raise
    leave()


def _run(kind: str, target: str, arguments: Sequence[str]) -> None:
    if kind == "module":
        sys.argv = [target, *arguments]
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif kind == "script":
        sys.argv = [target, *arguments]
        sys.path[0] = os.path.dirname(os.path.realpath(target))  # noqa: PTH120 - as Python sets it
        runpy.run_path(target, run_name="__main__")
    else:
        sys.argv = ["-c", *arguments]
        sys.path[0] = ""
        exec(compile(target, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - it is what the user typed


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3:])
