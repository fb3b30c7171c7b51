"""A network laboratory at a shell: hosts on this machine whose links you cut, mend and shape.

    $ sudo .venv/bin/python tools/netlab.py shell -n 3      # a shell; the lab ends with it
    # netlab run 1 -- ping -c1 10.77.0.2
    # netlab cut 1 2 ; netlab mend 1 2
    # netlab shape 3 100                                    # Mbit/s

Hosts are numbered from 1. Linux, root.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import cyclopts

from tools.virtual_lan import Host, NetLab, NetLabError, clean, labs, why_not

LAB_VARIABLE = "NETLAB"  # in the lab's shell: the lab that its commands mean
app = cyclopts.App(name="netlab", help=__doc__, help_format="plaintext", version_flags=[])


def _lab() -> NetLab:
    here = [os.environ[LAB_VARIABLE]] if LAB_VARIABLE in os.environ else labs()
    if len(here) != 1:
        found = (
            f"several run: set {LAB_VARIABLE} to one of {', '.join(here)}" if here else "none runs"
        )
        raise NetLabError(f"which lab? {found}")
    return NetLab.running(here[0])


def _host(lab: NetLab, number: int) -> Host:
    for host in lab.hosts:
        if host.number == number:
            return host
    raise NetLabError(f"{lab.name} has no host {number}, only {len(lab.hosts)} of them")


def _describe(lab: NetLab) -> None:
    print(lab.name)
    for host in lab.hosts:
        print(f"  {host.number}  {host.ipv4:12}  {host.ipv6:9}  {host.namespace}")


@app.command
def shell(*, count: Annotated[int, cyclopts.Parameter(alias="-n")] = 3) -> int:
    """Make a lab and open a shell that has `netlab` as a command; the lab ends with the shell."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # else they would end us without the lab's end
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with NetLab(count) as lab, tempfile.TemporaryDirectory() as folder:
        command = Path(folder, "netlab")
        command.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" "$@"\n'
        )
        command.chmod(0o700)
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        _describe(lab)
        print("netlab run 1 -- COMMAND, netlab --help; the lab ends with this shell.", flush=True)
        return subprocess.run(
            [os.environ.get("SHELL", "/bin/sh")],
            env=os.environ | {LAB_VARIABLE: lab.name, "PATH": path},
            check=False,
        ).returncode


@app.command
def run(host: int, *command: Annotated[str, cyclopts.Parameter(allow_leading_hyphen=True)]) -> None:
    """Run a command in a host: `netlab run 1 -- ping -c1 10.77.0.2`."""
    inside = _host(_lab(), host).command(command)
    os.execvp(inside[0], inside)  # noqa: S606 - the command takes our place: terminal, signals, code


@app.command
def cut(host: int, *others: int, one_way: bool = False) -> None:
    """Let packets between a host and the others (all, if none is named) vanish.

    Args:
        host: One end.
        others: The other ends.
        one_way: Only those from `host` vanish.
    """
    lab = _lab()
    lab.cut(_host(lab, host), *(_host(lab, other) for other in others), one_way=one_way)


@app.command
def mend(host: int, *others: int) -> None:
    """Undo cut."""
    lab = _lab()
    lab.mend(_host(lab, host), *(_host(lab, other) for other in others))


@app.command
def unplug(host: int) -> None:
    """Pull a host's cable: unlike with cut, its interface loses the carrier."""
    lab = _lab()
    lab.unplug(_host(lab, host))


@app.command
def plug(host: int) -> None:
    """Undo unplug."""
    lab = _lab()
    lab.plug(_host(lab, host))


@app.command
def shape(host: int, mbit: float | None = None, *, delay_ms: float = 0.0) -> None:
    """Give a host a slower line, alike in both directions; without a number the bare one again.

    Args:
        host: Whose line.
        mbit: Bandwidth in Mbit/s.
        delay_ms: One way; only where the kernel has netem.
    """
    lab = _lab()
    bits_per_s = None if mbit is None else round(mbit * 1e6)
    lab.shape(_host(lab, host), bits_per_s=bits_per_s, delay_s=delay_ms / 1000)


@app.command
def lose(percent: float) -> None:
    """Lose this share of all packets; 0 ends that."""
    _lab().lose(percent)


@app.command(name="list")
def list_labs() -> None:
    """List the labs of this machine and their hosts."""
    for name in labs():
        _describe(NetLab.running(name))


@app.command(name="clean")
def clean_up() -> None:
    """Remove labs that were left by killed processes; others stay."""
    for name in clean():
        print(f"removed {name}")


def main() -> int:
    """The command line; errors are one line."""
    reason = why_not()
    if reason is not None:
        print(f"netlab: {reason}", file=sys.stderr)
        return 1
    try:
        return app(result_action="return_int_as_exit_code_else_zero") or 0
    except NetLabError as e:
        print(f"netlab: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
