"""The commands, their options and their exit codes.

Each command imports what it needs when it runs: help and completion need none of it, and `pmesh
top` stays in memory for hours.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from pmesh.agent.log_level import LogLevel
from pmesh.cli.bridging import entrenar
from pmesh.cli.launching import allow_run_, end_own_options, fetch, logs, mlx_, ps, run_, stop
from pmesh.cli.membership import invite, join, members, remove, rotate
from pmesh.cli.options import Flag, Home, Several
from pmesh.errors import ConfigError, PmeshError, UsageError
from pmesh.terminal.lines import complain, complain_of, say

FAILED = 1
MISUSED = 2
INTERRUPTED = 130  # 128 + SIGINT, as in shells


def _version() -> str:
    from pmesh.cli.version import version_text

    return version_text()


app = App(
    name="pmesh",
    help="Turns the Macs and Linux boxes at home into one training cluster.",
    version=_version,
    suppress_keyboard_interrupt=False,
)
key_app = App(name="key", help="The mesh key: every machine that holds it is a member of the mesh.")
app.command(key_app)
app.command(run_, name="run")
app.command(mlx_, name="mlx")
for _command in (ps, logs, fetch, stop):
    app.command(_command)
allow_app = App(name="allow", help="What other members of the mesh may do on this machine.")
app.command(allow_app)
allow_app.command(allow_run_, name="run")
app.command(invite)
app.command(join)
key_app.command(rotate)
app.command(members)
app.command(remove)
checkpoint_app = App(name="checkpoint", help="Look into the folders of pmesh.Checkpoints.")
app.command(checkpoint_app)

bridge_app = App(name="bridge", help="Let programs that are not pmesh's take part in a job.")
app.command(bridge_app)
bridge_app.command(entrenar)

service_app = App(name="service", help="Start the agent at boot, and again when it has crashed.")
app.command(service_app)


@key_app.command
def new(*, home: Home = None) -> int:
    """Make a mesh key, once, on the first machine."""
    from pmesh.cli.keys import make

    return make(home)


@key_app.command
def show(*, home: Home = None) -> int:
    """Print the mesh key, and nothing else on standard output."""
    from pmesh.cli.keys import show as show_key

    return show_key(home)


@key_app.command(name="set")
def set_(
    *words: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)], home: Home = None
) -> int:
    """Store the mesh key of another machine, from a prompt or from standard input.

    Args:
        words: Refused and never echoed, as they may be a key.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.keys import take

    return take(words, home)


@checkpoint_app.command(name="list")
def list_(*folders: Path) -> int:
    """List the steps that are saved in folders.

    Args:
        folders: What scripts give to pmesh.Checkpoints; several are looked at together.
    """
    from pmesh.cli.checkpoint import list_checkpoints

    return list_checkpoints(folders)


@checkpoint_app.command(name="show")
def show_arrays(*folders: Path, step: int | None = None) -> int:
    """Show the arrays of one step.

    Args:
        folders: What scripts give to pmesh.Checkpoints.
        step: Which; default the latest that is whole.
    """
    from pmesh.cli.checkpoint import show_checkpoint

    return show_checkpoint(folders, step)


@checkpoint_app.command
def export(*folders: Path, to: Path, step: int | None = None) -> int:
    """Write one step as one safetensors file.

    Args:
        folders: What scripts give to pmesh.Checkpoints; together they need all parts.
        to: The file to write.
        step: Which; default the latest that is whole.
    """
    from pmesh.cli.checkpoint import export_checkpoint

    return export_checkpoint(folders, to, step)


@app.command
def up(
    *,
    name: str | None = None,
    listen: str | None = None,
    peer: Annotated[tuple[str, ...] | None, Parameter(negative="", show_default=False)] = None,
    peers_from: Path | None = None,
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
    detach: Flag = False,
) -> int:
    """Run the agent until Ctrl-C or 'pmesh down'.

    Args:
        name: The name of this machine; default its host name.
        listen: HOST:PORT; default all addresses, port 24160.
        peer: HOST:PORT of another agent, for networks without multicast; may be repeated.
        peers_from: A host file of MLX or Open MPI: each machine in it is a --peer.
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
    from pmesh.cli.up import bring_up

    if peers_from is not None:
        from pmesh.cli.host_files import read_hosts

        peer = (*(peer or ()), *read_hosts(peers_from))
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
    watch: Flag = False,
    all: Flag = False,  # noqa: A002 - an option
    json: Flag = False,
    home: Home = None,
) -> int:
    """Show the machines of the mesh, how fast its jobs train, and what is wrong.

    Args:
        watch: Refresh every second, until Ctrl-C.
        all: Show all addresses and paths, ids, counters and traffic.
        json: Print JSON; its schema is docs/reference/status.schema.json.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.status import show_status

    return show_status(home, watch=watch, whole=all, as_json=json)


@app.command
def top(*, home: Home = None) -> int:
    """Show the mesh as it lives: its ring, its jobs with their loss, who is slowest and why.

    It fits the terminal, and q or Ctrl-C ends it. Without a terminal it prints one screen.

    Args:
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.top.command import show_top

    return show_top(home)


@app.command
def doctor(*, peer: Several = (), json: Flag = False, home: Home = None) -> int:
    """Find what keeps machines apart or slow, and say what to type.

    The exit code is 0 if nothing keeps them apart, 1 if something does, 2 if it could not look.

    Args:
        peer: HOST:PORT of a machine that should be in the mesh, and is dialled; may be repeated.
        json: Print one line of JSON.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.doctor.command import run_doctor

    return run_doctor(home, peer, as_json=json)


@app.command
def ping(
    name: str,
    /,
    *,
    json: Flag = False,
    home: Home = None,
) -> int:
    """Try every way to another machine, and say which one is used and why.

    Args:
        name: The machine, as 'pmesh status' shows it.
        json: Print one line of JSON.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.ping import show_ping

    return show_ping(home, name, as_json=json)


@app.command
def events(
    *,
    follow: Flag = False,
    json: Flag = False,
    home: Home = None,
) -> int:
    """Show past events: peers that joined or were lost, and the effects on jobs.

    Args:
        follow: Continue with new events, until Ctrl-C.
        json: Print JSON; its schema is docs/reference/events.schema.json.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.events import show_events

    return show_events(home, follow=follow, as_json=json)


@app.command
def trace(
    job: str, /, *, seconds: float = 60.0, output: Path | None = None, home: Home = None
) -> int:
    """Show where the time of a job's ranks went lately, and write a file for ui.perfetto.dev.

    Args:
        job: Its name, as 'pmesh status' shows it.
        seconds: How far to look back; each rank keeps its last 16,384 calls.
        output: The file, .json or .json.gz; default pmesh-trace-JOB.json.gz in this directory.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.trace import write_trace

    return write_trace(home, job, seconds, output)


@app.command
def init(
    file: Path = Path("train.py"),
    /,
    *,
    library: Annotated[Literal["mlx", "torch", "numpy"] | None, Parameter(name="--with")] = None,
) -> int:
    """Write a training script to start from: it reads handwritten digits, and runs at once.

    Args:
        file: Where; a file that is there is never overwritten.
        library: What it trains with; default the first of these that is installed.
    """
    from pmesh.cli.init import write_script

    return write_script(file, library)


@app.command
def plot(what: str, /, *, output: Path | None = None, home: Home = None) -> int:
    """Draw the last hour of a job: its loss and its speed; or what 'pmesh bench --json' printed.

    Args:
        what: A job as 'pmesh status' shows it, or a file whose name ends in .json.
        output: The picture, .png, .svg or .pdf; default pmesh-plot-WHAT.png in this directory.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.plot import write_plot

    return write_plot(home, what, output)


@app.command
def metrics(*, listen: str = "127.0.0.1:9477", home: Home = None) -> int:
    """Serve what 'pmesh status' shows to Prometheus, until Ctrl-C.

    Args:
        listen: HOST:PORT; with port 0 the system picks one.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.metrics import serve_metrics

    return serve_metrics(home, listen)


@app.command
def dashboard(
    *,
    listen: str = "127.0.0.1:9478",
    token: Flag = False,
    home: Home = None,
) -> int:
    """Serve a page for browsers that shows the mesh and its jobs, until Ctrl-C.

    Args:
        listen: HOST:PORT; with port 0 the system picks one.
        token: Only the link that is printed opens the page; for a HOST that others reach.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.dashboard.command import serve_dashboard

    return serve_dashboard(home, listen, with_token=token)


@app.command
def bench(
    *,
    min_size: str = "1KiB",
    max_size: str = "256MiB",
    collective: Several = (),
    strategy: Several = (),
    seconds: float = 1.0,
    wait_for: int | None = None,
    json: Flag = False,
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
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.bench import BenchOptions, run_bench

    options = BenchOptions(
        min_size=min_size,
        max_size=max_size,
        collectives=collective,
        strategies=strategy,
        seconds=seconds,
        wait_for=wait_for,
        as_json=json,
    )
    return run_bench(home, options)


@service_app.command(name="install")
def service_install(*, home: Home = None) -> int:
    """Start the agent now and at each boot: by systemd, or on a Mac by launchd, with sudo.

    Args:
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli import service

    return service.install(home)


@service_app.command(name="remove")
def service_remove() -> int:
    """Stop the agent, and do not start it any more."""
    from pmesh.cli import service

    return service.remove()


@service_app.command(name="status")
def service_status() -> int:
    """Say whether the agent is started at boot, and whether it runs; the exit code is 0 or 1."""
    from pmesh.cli import service

    return service.show()


@app.command(name="forget")
def forget_(name: str, /, *, home: Home = None) -> int:
    """Let another machine have a name: you have reinstalled the one that had it before.

    Args:
        name: As 'pmesh status' shows it.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.launches.cli.launches import forget

    return forget(home, name)


@app.command
def demo() -> int:
    """Train a small model with three agents and three trainers on this machine; half a minute."""
    from pmesh.cli.demo import run_demo

    return run_demo()


@app.command
def down(*, home: Home = None) -> int:
    """Stop the local agent cleanly: its peers see a leave, not a failure."""
    from pmesh.cli.down import bring_down

    return bring_down(home)


@app.command
def bugreport(*, to: Path | None = None, home: Home = None) -> int:
    """Write one text file with all that is needed to find a fault on this machine, but no key.

    Args:
        to: The file; default pmesh-bugreport-DATE-TIME.txt in this directory.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.bugreport import write_report

    return write_report(home, to)


@app.command
def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print the script that completes the commands in a shell.

    Args:
        shell: Whose language: bash reads it by eval "$(pmesh completion bash)".
    """
    say(*app.generate_completion(shell=shell).splitlines())
    return 0


@app.command(name="man")
def man_() -> int:
    """Print the manual page: 'pmesh man > ~/.local/share/man/man1/pmesh.1', then 'man pmesh'."""
    from pmesh.cli.manual import manual_page

    say(*manual_page(app).splitlines())
    return 0


@app.command
def version() -> int:
    """Print the version of pmesh and of its protocol, and whether it has its native library."""
    say(_version())
    return 0


IN_ORDER_OF_USE = (
    *("key", "up", "invite", "join", "status", "top"),
    *("init", "run", "ps", "logs", "fetch", "stop", "allow", "mlx", "checkpoint"),
    *("doctor", "members", "remove", "events", "trace", "plot", "ping"),
    *("dashboard", "metrics", "bench", "demo", "bridge", "forget", "service", "down"),
    *("bugreport", "completion", "man", "version"),
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
        command = " ".join(("pmesh", *(e.command_chain or ())))
        said = str(e) if str(e).endswith("...") else str(e).removesuffix(".")
        complain(f"UsageError: {said}; see '{command} --help'")
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
    from pmesh.agent.home import is_full, reason

    if is_full(error):
        complain_of(UsageError(f"can't write the output: {reason(error)}"))
    elif not isinstance(error, BrokenPipeError):
        raise error
    # Python would report the error again when it flushes at exit.
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED
