"""The commands, their options and their exit codes."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from pmesh.agent.config import LogLevel
from pmesh.agent.home import is_full, reason
from pmesh.cli import keys, service
from pmesh.cli.events import show_events
from pmesh.cli.ping import show_ping
from pmesh.cli.status import bring_down, show_status
from pmesh.cli.up import bring_up
from pmesh.cli.version import version_text
from pmesh.errors import ConfigError, PmeshError, UsageError
from pmesh.launches.cli.launches import allow_run, forget, show_hosts, show_launches, stop_launch
from pmesh.launches.cli.run import run_command
from pmesh.launches.wire.messages import AskHosts, Backend, Engine, LaunchTerms
from pmesh.terminal.lines import complain, complain_of, say
from pmesh.terminal.sizes import parse_size

FAILED = 1
MISUSED = 2
INTERRUPTED = 130  # 128 + SIGINT, as in shells

Home = Annotated[
    Path | None, Parameter(help="The agent's home directory; default PMESH_HOME, else ~/.pmesh.")
]

app = App(
    name="pmesh",
    help="Turns the Macs and Linux boxes at home into one training cluster.",
    version=version_text,
    suppress_keyboard_interrupt=False,
)
key_app = App(name="key", help="The mesh key: every machine that holds it is a member of the mesh.")
app.command(key_app)
allow_app = App(name="allow", help="What other members of the mesh may do on this machine.")
app.command(allow_app)
checkpoint_app = App(name="checkpoint", help="Look into the folders of pmesh.Checkpoints.")
app.command(checkpoint_app)

service_app = App(name="service", help="Start the agent at boot, and again when it has crashed.")
app.command(service_app)


@key_app.command
def new(*, home: Home = None) -> int:
    """Make a mesh key, once, on the first machine."""
    return keys.make(home)


@key_app.command
def show(*, home: Home = None) -> int:
    """Print the mesh key, and nothing else on standard output."""
    return keys.show(home)


@key_app.command(name="set")
def set_(
    *words: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)], home: Home = None
) -> int:
    """Store the mesh key of another machine, from a prompt or from standard input.

    Args:
        words: Refused and never echoed, as they may be a key.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    return keys.take(words, home)


@checkpoint_app.command(name="list")
def list_(*folders: Path) -> int:
    """List the steps that are saved in folders.

    Args:
        folders: What scripts give to pmesh.Checkpoints; several are looked at together.
    """
    from pmesh.cli.checkpoint import list_checkpoints  # noqa: PLC0415 - numpy

    return list_checkpoints(folders)


@checkpoint_app.command(name="show")
def show_arrays(*folders: Path, step: int | None = None) -> int:
    """Show the arrays of one step.

    Args:
        folders: What scripts give to pmesh.Checkpoints.
        step: Which; default the latest that is whole.
    """
    from pmesh.cli.checkpoint import show_checkpoint  # noqa: PLC0415 - numpy

    return show_checkpoint(folders, step)


@checkpoint_app.command
def export(*folders: Path, to: Path, step: int | None = None) -> int:
    """Write one step as one safetensors file.

    Args:
        folders: What scripts give to pmesh.Checkpoints; together they need all parts.
        to: The file to write.
        step: Which; default the latest that is whole.
    """
    from pmesh.cli.checkpoint import export_checkpoint  # noqa: PLC0415 - numpy

    return export_checkpoint(folders, to, step)


@app.command
def up(
    *,
    name: str | None = None,
    listen: str | None = None,
    peer: Annotated[tuple[str, ...] | None, Parameter(negative="", show_default=False)] = None,
    interface: Annotated[tuple[str, ...] | None, Parameter(negative="", show_default=False)] = None,
    not_interface: Annotated[
        tuple[str, ...] | None, Parameter(negative="", show_default=False)
    ] = None,
    mdns: bool | None = None,
    min_peers: int | None = None,
    allow_run: bool | None = None,
    compression: str | None = None,
    home: Home = None,
    key_file: Path | None = None,
    log_level: LogLevel | None = None,
    log_json: bool | None = None,
    detach: Annotated[bool, Parameter(negative="", show_default=False)] = False,
) -> int:
    """Run the agent until Ctrl-C or 'pmesh down'.

    Args:
        name: The name of this machine; default its host name.
        listen: HOST:PORT; default all addresses, port 24160.
        peer: HOST:PORT of another agent, for networks without multicast; may be repeated.
        interface: The only network interface to use; may be repeated. Default all but VPNs.
        not_interface: A network interface not to use; may be repeated.
        mdns: Look for other agents by mDNS.
        min_peers: How many peers must be present before a job may begin.
        allow_run: Run what other members ask for, as after 'pmesh allow run'.
        compression: Gradient compression of trainers here that choose none, such as int8 or auto;
            the same on all machines of a job. Default none.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
        key_file: The file that holds the mesh key, if it is not in the home.
        log_level: The lowest level that is logged; default info.
        log_json: Log JSON lines.
        detach: Run in the background; the log goes to agent.log in the home.
    """
    flags = {
        "name": name,
        "listen": listen,
        "peers": peer,
        "interfaces": interface,
        "not_interfaces": not_interface,
        "mdns": mdns,
        "min_peers": min_peers,
        "allow_run": allow_run,
        "compression": compression,
        "key_file": key_file,
        "log_level": log_level,
        "log_json": log_json,
    }
    return bring_up(home, flags, detach=detach)


@app.command
def status(
    *,
    watch: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    all: Annotated[bool, Parameter(negative="", show_default=False)] = False,  # noqa: A002 - an option
    json: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    home: Home = None,
) -> int:
    """Show the machines of the mesh, how fast its jobs train, and what is wrong.

    Args:
        watch: Refresh every second, until Ctrl-C.
        all: Show all addresses and paths, ids, counters and traffic.
        json: Print JSON; its schema is docs/reference/status.schema.json.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    return show_status(home, watch=watch, whole=all, as_json=json)


@app.command
def ping(
    name: str,
    /,
    *,
    json: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    home: Home = None,
) -> int:
    """Try every way to another machine, and say which one is used and why.

    Args:
        name: The machine, as 'pmesh status' shows it.
        json: Print one line of JSON.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    return show_ping(home, name, as_json=json)


@app.command
def events(
    *,
    follow: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    json: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    home: Home = None,
) -> int:
    """Show past events: peers that joined or were lost, and the effects on jobs.

    Args:
        follow: Continue with new events, until Ctrl-C.
        json: Print JSON; its schema is docs/reference/events.schema.json.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    return show_events(home, follow=follow, as_json=json)


@app.command
def bench(
    *,
    min_size: str = "1KiB",
    max_size: str = "256MiB",
    collective: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    strategy: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    seconds: float = 1.0,
    wait_for: int | None = None,
    json: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    plot: Path | None = None,
    home: Home = None,
) -> int:
    """Measure the collectives on this mesh; run it on each machine, and rank 0 shows the table.

    Args:
        min_size: The smallest array, in bytes, KiB, MiB or GiB; each size is 4 times the previous.
        max_size: The largest array.
        collective: Measure only this collective; may be repeated.
        strategy: Measure only this strategy, of collectives with several; may be repeated.
        seconds: How long to measure each row, in at least three calls.
        wait_for: How many trainers to wait for; default one on each machine of the mesh.
        json: Print JSON on this machine.
        plot: A file for a plot of time and bandwidth over size, .png or .svg.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.bench import BenchOptions, run_bench  # noqa: PLC0415 - numpy, which others don't need

    options = BenchOptions(
        min_size=min_size,
        max_size=max_size,
        collectives=collective,
        strategies=strategy,
        seconds=seconds,
        wait_for=wait_for,
        as_json=json,
        plot=plot,
    )
    return run_bench(home, options)


@app.command(name="run")
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
    detach: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    env: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    cwd: Path | None = None,
    python: str = "",
    module: Annotated[str, Parameter(name=["--module", "-m"])] = "",
    shell: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    sync: Annotated[bool, Parameter(negative="", show_default=False)] = False,
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
    from pmesh.launches.cli.launch import RunOptions, launch_of, run_launch  # noqa: PLC0415 - for speed

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
        return run_command(command, restarts=restarts)
    if engine == "mpi":
        return show_hosts(home, AskHosts(options.machines, count, per_node), command)
    return run_launch(home, launch_of(command, options, os.environ), options)


@app.command(name="mlx")
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
    from pmesh.cli.mlx import run_mlx  # noqa: PLC0415 - numpy, which others don't need

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


@app.command
def ps(
    *,
    all: Annotated[bool, Parameter(negative="", show_default=False)] = False,  # noqa: A002 - an option
    home: Home = None,
) -> int:
    """Show the commands that 'pmesh run --on' has started from here, and those that run here.

    Args:
        all: Show also older ones, and of each who has started it and the whole command.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    return show_launches(home, whole=all)


@app.command
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
    from pmesh.launches.cli.launch import show_log  # noqa: PLC0415 - for speed

    return show_log(home, launch, follow=follow)


@app.command
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
    from pmesh.launches.cli.fetch import show_fetch  # noqa: PLC0415 - for speed

    return show_fetch(home, launch, to, most_bytes=parse_size("--limit", limit))


@app.command
def stop(launch: str, /, *, home: Home = None) -> int:
    """End a command everywhere.

    Args:
        launch: Its id or its job, as 'pmesh ps' shows them.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    return stop_launch(home, launch)


@allow_app.command(name="run")
def allow_run_(
    *,
    member: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    as_root: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    no: Annotated[bool, Parameter(negative="", show_default=False)] = False,
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
    return allow_run(home, member, as_root=as_root, no=no)


@service_app.command(name="install")
def service_install(*, home: Home = None) -> int:
    """Start the agent now and at each boot: by systemd, or on a Mac by launchd, with sudo.

    Args:
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    return service.install(home)


@service_app.command(name="remove")
def service_remove() -> int:
    """Stop the agent, and do not start it any more."""
    return service.remove()


@service_app.command(name="status")
def service_status() -> int:
    """Say whether the agent is started at boot, and whether it runs; the exit code is 0 or 1."""
    return service.show()


@app.command(name="forget")
def forget_(name: str, /, *, home: Home = None) -> int:
    """Let another machine have a name: you have reinstalled the one that had it before.

    Args:
        name: As 'pmesh status' shows it.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    return forget(home, name)


@app.command
def demo() -> int:
    """Train a small model with three agents and three trainers on this machine; half a minute."""
    from pmesh.cli.demo import run_demo  # noqa: PLC0415 - numpy

    return run_demo()


@app.command
def down(*, home: Home = None) -> int:
    """Stop the local agent cleanly: its peers see a leave, not a failure."""
    return bring_down(home)


@app.command
def bugreport(*, to: Path | None = None, home: Home = None) -> int:
    """Write one text file with all that is needed to find a fault on this machine, but no key.

    Args:
        to: The file; default pmesh-bugreport-DATE-TIME.txt in this directory.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.bugreport import write_report  # noqa: PLC0415 - others don't need it

    return write_report(home, to)


@app.command
def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print the script that completes the commands in a shell.

    Args:
        shell: Whose language: bash reads it by eval "$(pmesh completion bash)".
    """
    say(*app.generate_completion(shell=shell).splitlines())
    return 0


@app.command
def version() -> int:
    """Print the version of pmesh and of its protocol, and whether it has its native library."""
    say(version_text())
    return 0


IN_ORDER_OF_USE = (
    *("key", "up", "status", "run", "ps", "logs", "fetch", "stop", "allow", "mlx", "checkpoint"),
    *(
        "events",
        "ping",
        "bench",
        "demo",
        "forget",
        "service",
        "down",
        "bugreport",
        "completion",
        "version",
    ),
)
for _place, _name in enumerate(IN_ORDER_OF_USE):
    app[_name].sort_key = _place  # else they are listed by the alphabet


def run(arguments: Sequence[str]) -> int:
    """Run one command, print each error on one line, and return the exit code."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # absent where a test has replaced it
    if reconfigure is not None:
        reconfigure(errors="replace")  # a terminal without UTF-8 shows '?', not an error
    try:
        result = app(
            end_own_options(arguments),
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
    except CycloptsError as e:
        complain(f"{type(e).__name__}: {e}; see 'pmesh --help'")
        return MISUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as e:
        return _output_lost(e)
    except PmeshError as e:
        complain_of(e)
        return _code_of(e)
    except BaseExceptionGroup as group:
        return _report(group)
    return result if isinstance(result, int) else 0  # --help and --version return text or nothing


def _report(group: BaseExceptionGroup[BaseException]) -> int:
    """Print the errors that trio grouped; raise the group again if one of them is a bug."""
    expected, unexpected = group.split((PmeshError, KeyboardInterrupt, OSError))
    if unexpected is not None or expected is None:
        raise group
    code = FAILED
    for error in _leaves(expected):
        if isinstance(error, PmeshError):
            complain_of(error)
            code = max(code, _code_of(error))
        elif isinstance(error, OSError):
            code = max(code, _output_lost(error))
        else:
            code = INTERRUPTED
    return code


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            yield from _leaves(inner)  # pyright: ignore[reportUnknownArgumentType]
    else:
        yield error


def _code_of(error: PmeshError) -> int:
    return MISUSED if isinstance(error, ConfigError) else FAILED


def _output_lost(error: OSError) -> int:
    """Report a full disk, but not a closed pipe as in `pmesh status | head`."""
    if is_full(error):
        complain_of(UsageError(f"can't write the output: {reason(error)}"))
    elif not isinstance(error, BrokenPipeError):
        raise error
    # Python would report the error again when it flushes at exit.
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED
