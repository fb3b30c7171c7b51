"""Real agents and real trainers as processes, waited for by what they say, and always reaped.

fleet.start_agent("mac-1") and "mac-2"; fleet.await_view(one, two)
fleet.start_trainer(one, "import pmesh ...").await_end()
"""

import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Self

from pmesh.agent.schema import EpochStatus, Status, decode_status
from pmesh.client.control import ask_status
from pmesh.errors import AgentNotRunning, AgentStopped
from pmesh.launches.cli.launches import allow_run
from tools.lab.commands import LabError
from tools.lab.mesh import inherited, new_key
from tools.lab.net import LabHost, NetLab
from tools.lab.program import LabProgram, await_that

TIMEOUT_S = 30.0  # imports of several processes on two busy cores take 5 s
POLL_INTERVAL_S = 0.02
LOOPBACK = "127.0.0.1:0"  # port 0: the system picks one; the agent's status tells which


class Running(LabProgram):
    """A program whose output, both streams together, is kept line by line."""

    @property
    def output(self) -> str:
        """All that it has printed, but for whom a trainer waits: that depends on the machine."""
        return "\n".join(line for line in self.printed() if not line.startswith("waiting: "))

    def await_line(self, pattern: str, *, timeout_s: float = TIMEOUT_S) -> re.Match[str]:
        """The next line, after the one found last, in which the pattern occurs."""
        found: list[re.Match[str]] = []

        def comes() -> bool:
            while self._heard < len(self.lines) and not found:
                found.extend(re.finditer(pattern, self.lines[self._heard].text))
                self._heard += 1
            return bool(found)

        try:
            await_that(comes, pattern, within_s=timeout_s, of=[self])
        except LabError:
            raise AssertionError(
                f"{self.name} has not printed {pattern!r}; it printed\n{self.output}"
            ) from None
        return found[0]

    def await_end(self, *, code: int = 0, timeout_s: float = TIMEOUT_S) -> str:
        """All that it printed, once it has ended with this exit code."""
        try:
            ended = self.join(within_s=timeout_s)
        except LabError:
            raise AssertionError(
                f"{self.name} has not ended in {timeout_s:g} s; it printed\n{self.output}"
            ) from None
        assert ended == code, (
            f"{self.name} ended with {ended}, not {code}; it printed\n{self.output}"
        )
        return self.output

    def reap(self) -> None:
        """End it and all that it started, whatever state that is in."""
        self.end()


class StartedAgent:
    """A `pmesh up` with its home."""

    def __init__(self, process: Running, home: Path, host: LabHost | None) -> None:
        self.process = process
        self.home = home
        self.host = host

    @property
    def name(self) -> str:
        """What others call it."""
        return self.process.name

    def status(self) -> Status:
        """Its picture, now."""
        return decode_status(ask_status(self.home))

    def await_status(
        self, holds: Callable[[Status], bool], *, timeout_s: float = TIMEOUT_S
    ) -> Status:
        """The first picture for which this holds; also waits for the agent to have a socket."""
        deadline = time.monotonic() + timeout_s
        status: Status | None = None
        while time.monotonic() < deadline:
            if not self.process.alive:
                break
            try:
                status = self.status()
            except (AgentNotRunning, AgentStopped):
                pass  # it starts, or has just ended
            else:
                if holds(status):
                    return status
            time.sleep(POLL_INTERVAL_S)
        raise AssertionError(
            f"{self.process.name} never came to the awaited status; the last was\n{status}\n"
            f"{'it runs' if self.process.alive else 'it has ended'}, and printed\n"
            f"{self.process.output}"
        )

    @property
    def address(self) -> str:
        """HOST:PORT, for the `--peer` of others on the same machine."""
        return self.await_status(lambda status: bool(status.node.addresses)).node.addresses[0]


class Fleet:
    """All processes of one test, and the mesh key that they share."""

    def __init__(self) -> None:
        # A short path: a Unix socket's may have 103 bytes, and pytest's own directories are deep.
        self._folder = tempfile.TemporaryDirectory(prefix="pmesh-e2e-")
        self._running: list[Running] = []
        # Another key each time: agents of other tests may be heard by mDNS on the same loopback.
        self.mesh_key = new_key()

    def home(self, name: str) -> Path:
        """The home of the agent of that name."""
        return Path(self._folder.name).resolve() / name

    def start_agent(
        self,
        name: str,
        *options: str,
        host: LabHost | None = None,
        listen: str | None = None,
        mesh_key: str | None = None,
        patch: str = "",
        under: Sequence[str] = (),
        **variables: str,
    ) -> StartedAgent:
        """`pmesh up`, not yet awaited.

        Args:
            name: What others call it; one home per name, so that a second start is a restart.
            options: Further ones, such as `--peer` and `--no-mdns`.
            host: Of a lab, where it listens as a user's would; None for this machine's loopback.
            listen: HOST:PORT, if not that.
            mesh_key: If not the fleet's; empty: none is given, the home's own counts.
            patch: Source that runs in its process first: another version, another clock.
            under: A command in which it runs, such as a shell that lowers a limit.
            variables: Further ones of its environment.
        """
        if listen is None and host is None:
            listen = LOOPBACK
        listening = () if listen is None else ("--listen", listen)
        program = ["-c", f"{patch}\nfrom pmesh.cli import main; main()"]
        command = [*under, sys.executable, *program, "up", "--name", name, *listening, *options]
        if mesh_key != "":
            variables["PMESH_KEY"] = mesh_key or self.mesh_key
        process = self.start_program(name, command, host=host, home=self.home(name), **variables)
        return StartedAgent(process, self.home(name), host)

    def start_ring(self, *names: str) -> list[StartedAgent]:
        """Agents on this machine that know the first one's address, in one view."""
        first = self.start_agent(names[0], "--no-mdns")
        peer = ("--no-mdns", "--peer", first.address) if names[1:] else ()
        agents = [first, *(self.start_agent(name, *peer) for name in names[1:])]
        self.await_view(*agents)
        return agents

    def start_in(self, lab: NetLab, *options: str) -> list[StartedAgent]:
        """An agent in each host, mac-1 and so on, in one view."""
        agents = [self.start_agent(f"mac-{h.number}", *options, host=h) for h in lab.hosts]
        self.await_view(*agents)
        return agents

    def start_trainer(self, agent: StartedAgent, script: Path | str, *arguments: str) -> Running:
        """A program that calls `pmesh.connect()` and meets this agent; a str is its source."""
        program = [str(script)] if isinstance(script, Path) else ["-c", textwrap.dedent(script)]
        name = f"trainer {len(self._running)} at {agent.process.name}"
        command = [sys.executable, *program, *arguments]
        return self.start_program(name, command, host=agent.host, home=agent.home)

    def pmesh(
        self, *arguments: str, home: Path, piped: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """A command such as `pmesh status`, ended; its streams apart."""
        return subprocess.run(
            [sys.executable, "-m", "pmesh.cli", *arguments],
            env=_environment(home),
            input=piped,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def start_command(
        self, *arguments: str, home: Path, host: LabHost | None = None, **variables: str
    ) -> Running:
        """A command such as `pmesh status --watch`, not yet ended."""
        command = [sys.executable, "-m", "pmesh.cli", *arguments]
        name = f"pmesh {arguments[0]}"
        return self.start_program(name, command, host=host, home=home, **variables)

    def await_view(self, *agents: StartedAgent, timeout_s: float = TIMEOUT_S) -> EpochStatus:
        """The epoch of the one view that has these agents as its members, and no other."""
        ids = {agent.await_status(lambda _: True).node.id for agent in agents}

        def has_them(status: Status) -> bool:
            return {member.id for member in status.view.members} == ids

        # One after the other; a view that changed meanwhile makes the round begin again.
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.1, deadline - time.monotonic())
            views = [agent.await_status(has_them, timeout_s=left_s).view for agent in agents]
            if all(view.epoch == views[0].epoch for view in views):
                return views[0].epoch
            assert time.monotonic() < deadline, f"the agents never agreed:\n{views}"

    def start_program(
        self, name: str, command: list[str], *, host: LabHost | None, home: Path, **variables: str
    ) -> Running:
        """Start any program, with this home."""
        environment = _environment(home) | variables
        running = Running.start(name, command, environment=environment, host=host)
        self._running.append(running)
        return running

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Reap all; print what they said, which pytest shows if the test has failed."""
        for running in self._running:
            running.reap()
            print(f"--- {running.name}\n{running.output}")  # noqa: T201 - pytest captures it
        self._folder.cleanup()


def _environment(home: Path) -> dict[str, str]:
    """This process's, so that coverage goes along, but for settings of a developer's own agent."""
    return inherited() | {"PMESH_HOME": str(home), "PYTHONUNBUFFERED": "1"}


def allow_runs(agents: Iterable[StartedAgent]) -> None:
    """As `pmesh allow run --as-root` on each: the tests may run as root."""
    for agent in agents:
        allow_run(agent.home, (), as_root=True, no=False)
