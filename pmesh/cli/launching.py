"""The commands that start programs here and on other machines, and that look after them."""

import os
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from cyclopts import Parameter

from pmesh.cli.options import Flag, Home, Several
from pmesh.errors import ConfigError
from pmesh.launches.wire.engines import Backend, Engine
from pmesh.terminal.sizes import parse_size


def run_(
    *command: Annotated[str, Parameter(show_default=False)],
    on: str | None = None,
    count: Annotated[int, Parameter(name=["--count", "-n"])] = 0,
    per_node: Annotated[int, Parameter(name=["--per-node", "--nproc-per-node"])] = 1,
    job: str = "",
    engine: Engine | Literal["mpi"] = "pmesh",
    backend: Backend | None = None,
    restarts: int = 10,
    grace: float = 3.0,
    hang_timeout: float = 0.0,
    detach: Flag = False,
    env: Several = (),
    cwd: Path | None = None,
    python: str = "",
    module: Annotated[str, Parameter(name=["--module", "-m"])] = "",
    shell: Flag = False,
    sync: Flag = False,
    sync_limit: str = "100MiB",
    collect: Path | None = None,
    home: Home = None,
) -> int:
    """Run a command here, or with --on on several machines; start it again when it fails.

    Args:
        command: The command with its arguments: all from the first word that is not an option.
        on: The machines, such as mac-1,mac-3, or the first 8 or more characters of their ids; or
            all. Without it the command runs only here.
        count: How many ranks in all; default --per-node on each machine.
        per_node: How many ranks on each machine.
        job: The name of the job; default a new one.
        engine: What the script trains with: pmesh, gloo, nccl, mlx-ring or jaccl; or mpi, which
            starts nothing and prints a host file for mpirun.
        backend: pmesh: it answers where the script asks torch for gloo or nccl.
        restarts: How often in a row it is started again; a run of a minute begins a new count.
        grace: Seconds between a signal and SIGKILL.
        hang_timeout: Start all ranks again if none prints a line for so many seconds; 0: never.
        detach: Print the launch's id and end; 'pmesh logs' shows the output.
        env: NAME=VALUE for each rank; may be repeated.
        cwd: The working directory on each machine; default this one.
        python: The Python on each machine; default the one here.
        module: Run a Python module, as python -m does.
        shell: Run the words by /bin/sh.
        sync: Send the working directory first, but for what git ignores; run in a copy of it.
        sync_limit: How much all of its files may hold, in bytes, KiB, MiB or GiB.
        collect: At the end, bring what the ranks have written into their copies to this directory.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.launches.cli.launch import RunOptions, launch_of, run_launch
    from pmesh.launches.wire.messages import AskHosts, LaunchTerms

    terms = LaunchTerms(
        "pmesh" if engine == "mpi" else engine, restarts, grace, detach, hang_timeout, backend
    )
    if backend is not None and engine != "pmesh":
        raise ConfigError(f"--backend {backend} needs --engine pmesh, not {engine}")
    options = RunOptions(
        on="all" if on is None else on,
        count=count,
        per_node=per_node,
        terms=terms,
        job=job,
        environment=env,
        cwd=cwd,
        python=python,
        module=module,
        shell=shell,
        sync=sync,
        sync_limit=parse_size("--sync-limit", sync_limit),
        collect=collect,
    )
    if on is None:
        if engine == "mpi" or options != RunOptions(terms=LaunchTerms(restarts=restarts)):
            raise ConfigError(
                "without --on only --restarts can be given; name the machines, such as: --on all"
            )
        from pmesh.launches.cli.run import run_command

        return run_command(command, restarts=restarts)
    if engine == "mpi":
        from pmesh.launches.cli.launches import show_hosts

        return show_hosts(home, AskHosts(options.machines, count, per_node), command)
    return run_launch(home, launch_of(command, options, os.environ), options)


def mlx_(
    *command: Annotated[str, Parameter(show_default=False)],
    job: str | None = None,
    wait_for: int | None = None,
    compression: str | None = None,
    elastic: bool = True,
    home: Home = None,
) -> int:
    """Run an MLX program on all machines: 'pmesh mlx python train.py', the same on each.

    Args:
        command: The program with its arguments: python, '-m MODULE' or a console script.
        job: The job's name, the same on all machines; default PMESH_JOB, else the program's.
        wait_for: How many begin together; default PMESH_WAIT_FOR, else one on each machine.
        compression: How its gradients are compressed, such as int8; default what the agent has.
        elastic: Train 'mlx_lm.lora --train' by pmesh's own loop, which machines may leave and join.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.mlx import run_mlx

    return run_mlx(
        home, command, job=job, wait_for=wait_for, compression=compression, elastic=elastic
    )


_MODULE_OPTIONS = ("-m", "--module")
_VALUED_OPTIONS = MappingProxyType(
    {
        "run": (
            *("--on", "--count", "-n", "--per-node", "--nproc-per-node", "--job", "--engine"),
            *("--backend", "--restarts", "--grace", "--hang-timeout", "--env", "--cwd", "--python"),
            *("--sync-limit", "--collect", "--home"),
            *_MODULE_OPTIONS,
        ),
        "mlx": ("--job", "--wait-for", "--compression", "--home"),
    }
)
"""Of the commands that run another one, those of our own options that have a value."""


def end_own_options(arguments: Sequence[str]) -> Sequence[str]:
    """Insert `--` before the command of `pmesh run` or `mlx`: its options are not ours.

    >>> end_own_options(["run", "--restarts", "3", "python", "--version"])
    ['run', '--restarts', '3', '--', 'python', '--version']
    >>> end_own_options(["mlx", "--no-elastic", "-m", "mlx_lm", "lora", "--train"])
    ['mlx', '--no-elastic', '--', '-m', 'mlx_lm', 'lora', '--train']
    >>> end_own_options(["run", "--on", "all", "-m", "pkg.train", "--epochs", "3"])
    ['run', '--on', 'all', '-m', 'pkg.train', '--', '--epochs', '3']
    """
    valued = _VALUED_OPTIONS.get(arguments[0]) if arguments else None
    if valued is None:
        return arguments
    for place, word in enumerate(arguments):
        if arguments[place - 1] in _MODULE_OPTIONS and "-m" in valued:
            return [*arguments[: place + 1], "--", *arguments[place + 1 :]]
        is_value = arguments[place - 1] in valued
        begins = word == "-m" and "-m" not in valued
        if place and (begins or not (word.startswith("-") or is_value)):
            return [*arguments[:place], "--", *arguments[place:]]
        if word == "--":
            break
    return arguments


def ps(
    *,
    all: Flag = False,  # noqa: A002 - an option
    home: Home = None,
) -> int:
    """Show the commands that 'pmesh run --on' has started from here, and those that run here.

    Args:
        all: Show also older ones, and of each who has started it and the whole command.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.launches.cli.launches import show_launches

    return show_launches(home, whole=all)


def logs(
    launch: str,
    /,
    *,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], negative="", show_default=False)
    ] = False,
    home: Home = None,
) -> int:
    """Show what a command has printed: on the machine that started it, of all machines.

    Args:
        launch: Its id or its job, as 'pmesh ps' shows them.
        follow: Continue until the command has ended, or Ctrl-C.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.launches.cli.launch import show_log

    return show_log(home, launch, follow=follow)


def fetch(
    launch: str,
    /,
    *,
    to: Path | None = None,
    limit: str = "10GiB",
    home: Home = None,
) -> int:
    """Bring what the ranks of 'pmesh run --sync' have written into their copies to this machine.

    Args:
        launch: Its id or its job, as 'pmesh ps' shows them; it was started here.
        to: A directory, in which each machine gets one; default pmesh-ID.
        limit: How much each machine may send, in bytes, KiB, MiB or GiB.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.launches.cli.fetch import show_fetch

    return show_fetch(home, launch, to, most_bytes=parse_size("--limit", limit))


def stop(launch: str, /, *, home: Home = None) -> int:
    """End a command everywhere.

    Args:
        launch: Its id or its job, as 'pmesh ps' shows them.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.launches.cli.launches import stop_launch

    return stop_launch(home, launch)


def allow_run_(
    *,
    member: Several = (),
    as_root: Flag = False,
    no: Flag = False,
    home: Home = None,
) -> int:
    """Let members of the mesh run commands on this machine, as the user who runs its agent.

    Args:
        member: Only this machine, by its name, its id, or the first 8 or more characters of its
            id; may be repeated. What is stored is the id. Default every member.
        as_root: Also if the agent runs as root.
        no: Take all permissions back.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.launches.cli.launches import allow_run

    return allow_run(home, member, as_root=as_root, no=no)
