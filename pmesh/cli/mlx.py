"""`pmesh mlx`: which program is to run, in which Python, and by whom."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pmesh.agent.schema import decode_status
from pmesh.client.connect import check_job, default_wait_for
from pmesh.client.control import ask_status
from pmesh.compression.schemes import named
from pmesh.errors import ConfigError, UsageError
from pmesh.home_paths import home_directory
from pmesh.installed import mlx_requirement
from pmesh.launches.client.launched import MLXLaunch
from pmesh.terminal.lines import complain

RUNNER = "pmesh.mlx.program"
_VALUED_FLAGS = ("-W", "-X", "--check-hash-based-pycs")  # Python's own, with a word that follows
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?t?(\.exe)?")
_SHEBANG = re.compile(rb"(/[^\x00\n\"' ]*python[\d.]*t?)\b")
_ENV_SHEBANG = re.compile(rb"#! ?/usr/bin/env (?:-S )?(python\S*)")
_LORA = ("mlx_lm.lora", "mlx_lm lora")
_TRAINS = re.compile(r"^train:\s*(true|yes|on)\b", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A Python program, as its command line names it."""

    kind: Literal["script", "module", "code"]
    target: str
    """The path, the module's name or the source."""
    arguments: tuple[str, ...]
    python: str = sys.executable
    """The interpreter that runs it."""
    flags: tuple[str, ...] = ()
    """For that interpreter."""

    @property
    def name(self) -> str:
        """What a person would call it, without spaces or a suffix."""
        if self.kind == "code":
            return "python"
        name = Path(self.target).name.removesuffix(".py") if self.kind == "script" else self.target
        return f"{name}.{self.arguments[0]}" if name == "mlx_lm" and self.arguments else name


def program_of(command: Sequence[str]) -> Program:
    """The program that a command line starts.

    Raises:
        ConfigError: There is none.
        UsageError: It is not a Python program, or there is no such file.
    """
    if not command:
        raise ConfigError("there is no program; type for example: pmesh mlx -- python train.py")
    first, *others = command
    if first == "-m":
        return _with_flags(sys.executable, command)
    if _PYTHON.fullmatch(Path(first).name):
        return _with_flags(_found(first), others)
    if first.endswith(".py"):
        return Program(kind="script", target=first, arguments=tuple(others))
    path = _found(first)
    return Program(
        kind="script", target=path, arguments=tuple(others), python=_interpreter_of(path)
    )


def _with_flags(python: str, words: Sequence[str]) -> Program:
    flags: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in {"-m", "-c"}:
            kind: Literal["module", "code"] = "module" if word == "-m" else "code"
            target = next(rest, "")
            if not target:
                raise ConfigError(f"after {word} there must be something to run")
            return Program(
                kind=kind,
                target=target,
                arguments=tuple(rest),
                python=python,
                flags=tuple(flags),
            )
        if not word.startswith("-"):
            return Program(
                kind="script",
                target=word,
                arguments=tuple(rest),
                python=python,
                flags=tuple(flags),
            )
        flags.append(word)
        if word in _VALUED_FLAGS:
            flags.append(next(rest, ""))
    raise ConfigError("there is no program after 'python': name a script, or a module after -m")


def _found(command: str) -> str:
    path = shutil.which(command)
    if path is None:
        raise UsageError(f"there is no program {command!r}; is the right environment active?")
    return path


def _interpreter_of(path: str) -> str:
    """The Python that a console script names in its first lines."""
    try:
        with Path(path).open("rb") as script:
            begin = script.read(512)
    except OSError as e:
        raise UsageError(f"can't read {path}: {e.strerror}") from e
    by_path = _ENV_SHEBANG.match(begin)
    if by_path is not None:
        return _found(os.fsdecode(by_path[1]))
    its_own = _SHEBANG.search(b"".join(begin.splitlines(keepends=True)[:2]))
    if not begin.startswith(b"#!") or its_own is None:
        raise UsageError(f"{path} is not a Python program: pmesh mlx can run no other")
    return os.fsdecode(its_own[1])


def trains_lora(program: Program) -> bool:
    """Whether it is the training of mlx_lm.lora, for which there is a loop of ours.

    >>> trains_lora(program_of(["-m", "mlx_lm", "lora", "--train", "--model", "m"]))
    True
    >>> trains_lora(program_of(["-m", "mlx_lm", "lora", "--test", "--model", "m"]))
    False
    """
    if program.name not in _LORA:
        return False
    options = lora_arguments(program)
    return "--train" in options or _configured_to_train(options)


def lora_arguments(program: Program) -> list[str]:
    """The options of mlx_lm.lora itself."""
    of_mlx_lm = Path(program.target).name == "mlx_lm"
    return list(program.arguments[1:] if of_mlx_lm else program.arguments)


def _configured_to_train(options: Sequence[str]) -> bool:
    for option, value in pairwise(options):
        if option in {"-c", "--config"} and Path(value).is_file():
            try:
                text = Path(value).read_text(encoding="utf-8", errors="replace")
            except OSError:  # of which mlx-lm says more
                return False
            return _TRAINS.search(text) is not None
    return False


def run_mlx(
    home: Path | None,
    command: Sequence[str],
    *,
    job: str | None,
    wait_for: int | None,
    compression: str | None,
    elastic: bool,
) -> int:
    """Become the program, as a rank of a job; `mlx_lm.lora --train` by our own loop.

    Raises:
        ConfigError: There is no program.
        UsageError: It can't be started, MLX is not installed, or an option can't be used.
        UnsupportedCompression: There is no such compression.
        AgentNotRunning: The number of machines is not given, and there is no agent to ask.
    """
    program = program_of(command)
    if program.kind == "script" and not os.path.isfile(program.target):  # noqa: PTH113 - False for any name
        raise UsageError(f"there is no file {program.target}")
    ours = elastic and trains_lora(program)
    if not ours:
        _check_mlx(program.python)
    directory = home_directory(home)
    # `pmesh run --on` names the job and the number of ranks, not all machines of the mesh.
    job = os.environ.get("PMESH_JOB", program.name[:64]) if job is None else job
    wait_for = default_wait_for() if wait_for is None else wait_for
    launch = MLXLaunch(
        job=job,
        wait_for=_machines(directory) if wait_for is None else wait_for,
        compression=compression or "",
    )
    check_job(launch.job, launch.wait_for)
    if launch.compression not in {"", "none"}:
        named(launch.compression)
    os.environ.update(launch.variables(), PMESH_HOME=str(directory))
    if ours:
        from pmesh.mlx_lm import train  # noqa: PLC0415 - mlx-lm, which other programs need not have

        return train(lora_arguments(program))
    words = [program.python, *program.flags, "-m", RUNNER, program.kind, program.target]
    try:
        os.execv(program.python, [*words, *program.arguments])  # noqa: S606 - what the user named
    except OSError as e:
        raise UsageError(f"can't start {program.python}: {e.strerror}") from e


def _check_mlx(python: str) -> None:
    """Raise UsageError if the Python beside this one, or this one itself, has no MLX."""
    if Path(python).parent == Path(sys.executable).parent and find_spec("mlx") is None:
        raise UsageError(
            f"mlx is not installed beside pmesh: pip install {mlx_requirement()} in the "
            "environment that has pmesh"
        )


def _machines(directory: Path) -> int:
    """How many machines are in the mesh; prints their names, since the user must start on each."""
    members = decode_status(ask_status(directory)).view.members
    names = ", ".join(member.name for member in members)
    if len(members) > 1:
        complain(f"waiting until 'pmesh mlx' runs on {names}; --wait-for names another number")
    return len(members)
