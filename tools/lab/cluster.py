"""Hosts on a virtual network with an agent and a trainer each, which campaigns kill and restart.

Agents and trainers start in 20 ms: they are forks of a process that has imported everything
already. A campaign kills and restarts a thousand of them; importing them anew would take 1.5 s of
two cores each time. What runs in the fork is the command itself, `pmesh up` or the training script.

    python -m tools.lab.cluster FD     in a host of the lab; FD is a socket to the campaign
"""

import contextlib
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import msgspec

from pmesh.errors import PmeshError
from tools.lab.agents import inherited, new_key, status_of
from tools.lab.net import Host, NetLab
from tools.lab.oplog import Life, Op, Options, Report, decode_report, recovery_s

PATIENCE_S = 30.0  # for what must happen; what takes longer has hung
TRAINER = "tools.chaos.trainer"
MAX_ORDER_BYTES = 64 * 1024
# What `pmesh up` imports only when it runs, and what the trainers are.
IMPORTED = ("pmesh.agent.run", "pmesh.cli.app", TRAINER)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a fork shall become; its output goes to the descriptor that comes with the order."""

    kind: Literal["agent", "trainer"]
    arguments: tuple[str, ...]
    """Of `pmesh`; or the trainer's options."""
    environment: dict[str, str]
    patch: str = ""
    """Source that runs first."""


class WarmStart:
    """A host's forking process, seen from the campaign."""

    def __init__(self, host: Host, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(30.0)
        with theirs:
            self._process = subprocess.Popen(
                host.command([sys.executable, "-m", "tools.lab.cluster", str(theirs.fileno())]),
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is the campaign's, which then ends us
            )

    def start(self, order: Order, output: int) -> int:
        """The pid of a new process that does this and writes to `output`."""
        socket.send_fds(self._socket, [msgspec.msgpack.encode(order)], [output])
        answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError("the warm start has died; its traceback is above")
        return int(answer)

    def close(self) -> None:
        """End it; what it has started is the lab's to end."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._process.kill()
        self._process.wait()


def serve(orders: socket.socket) -> None:
    """Fork for each order, until the campaign has gone."""
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that a fork's collector touches, and thereby copies, none of these pages
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        message, outputs, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 1)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            orders.close()
            _become(msgspec.msgpack.decode(message, type=Order), outputs[0])
        os.close(outputs[0])
        orders.send(str(pid).encode())


def _reap(*_: Any) -> None:  # noqa: ANN401 - a signal handler's
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become(order: Order, output: int) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # Anew: what they know of the warm process's own output, such as that it can seek, is wrong.
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115 - they are descriptors, and stay open
    os.environ.clear()
    os.environ.update(order.environment)
    code = 1
    try:
        exec(order.patch, {})  # noqa: S102 - the campaign's own source
        code = _run(order)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:  # noqa: BLE001 - the process ends here, and says why
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(order: Order) -> int:
    if order.kind == "agent":
        sys.argv = ["pmesh", *order.arguments]
        importlib.import_module("pmesh.cli").main()
        return 0
    sys.argv = ["trainer.py"]
    code: int = importlib.import_module(TRAINER).main(*order.arguments)
    return code


class CampaignError(Exception):
    """The cluster has not come to where the campaign wants it; says what it has printed."""


@dataclass(slots=True, eq=False)
class Process:
    """An agent or a trainer, and what it has printed, each line with the time of its arrival."""

    name: str
    pid: int
    lines: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    life: Life | None = None
    """What it has reported, if it is a trainer."""
    ended: bool = False
    started: float = field(default_factory=time.monotonic)

    def send(self, number: signal.Signals) -> None:
        """A signal, unless it has ended."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def printed(self, *, since: float = 0.0) -> list[str]:
        """Its lines from this time on."""
        return [line for at, line in list(self.lines) if at >= since]

    def last_ring(self, *, since: float = 0.0) -> tuple[float, str]:
        """When an agent last printed a ring from this time on, and that line; else 0.0 and ""."""
        lines = reversed(list(self.lines))
        rings = ((at, line) for at, line in lines if at >= since and line.startswith("ring: "))
        return next(rings, (0.0, ""))


def runs(process: Process | None) -> bool:
    return process is not None and not process.ended


Part = Literal["agent", "trainer"]
BOTH: tuple[Part, ...] = ("agent", "trainer")


@dataclass(slots=True, eq=False)
class Node:
    """One machine of the cluster."""

    host: Host
    home: Path
    warm: WarmStart
    agent: Process | None = None
    trainer: Process | None = None

    @property
    def name(self) -> str:
        return f"mac-{self.host.number}"

    @property
    def life(self) -> Life:
        if self.trainer is None or self.trainer.life is None:
            raise CampaignError(f"{self.name} has no trainer")
        return self.trainer.life

    def processes(self, parts: Sequence[Part] = BOTH) -> list[Process]:
        """Its agent and its trainer, or one of them, as far as they were started."""
        chosen = [self.agent if part == "agent" else self.trainer for part in parts]
        return [process for process in chosen if process is not None]

    def send(self, number: signal.Signals, parts: Sequence[Part] = BOTH) -> None:
        """A signal to its agent and its trainer, or to one of them."""
        for process in self.processes(parts):
            process.send(number)

    def kill(self, *parts: Part) -> None:
        self.send(signal.SIGKILL, parts)

    def status(self) -> dict[str, Any]:
        """Its agent's picture, as `pmesh status --json` has it; empty if it does not answer."""
        try:
            return status_of(self.home, timeout_s=2.0)
        except PmeshError:
            return {}


def ops_of(
    nodes: Iterable[Node], counts: Callable[[Op], bool] = lambda _: True
) -> dict[str, list[Op]]:
    """What the nodes' present trainers have completed, by name, in the order of completion."""
    return {
        node.name: sorted(filter(counts, list(node.life.ops.values())), key=lambda op: op.done)
        for node in nodes
    }


def settled_ops(
    trainers: Iterable[Process], since: float, until: float
) -> tuple[dict[str, list[Op]], dict[str, list[Report]]]:
    """What trainers of any time have completed and raised in this time, by their names.

    Without the last op of one that has ended, which perhaps alone had the result, and took it
    along; and without what a trainer did alone and knew to.
    """
    ops: dict[str, list[Op]] = {}
    errors: dict[str, list[Report]] = {}
    for trainer in trainers:
        if (life := trainer.life) is not None:
            done = sorted(life.ops.values(), key=lambda op: op.done)
            ops[trainer.name] = [
                op
                for op in (done[:-1] if trainer.ended else done)
                if since < op.done <= until and not life.knew_to_be_alone(op)
            ]
            errors[trainer.name] = life.errors(since)
    return ops, errors


class Cluster:
    """`count` nodes, from `with` to its end; nothing of them is left, however that comes.

    Args:
        count: How many nodes.
        options: Of their trainers; each gets its own number.
        patch: Source that runs in each agent first.
        environment: Further variables of the processes of a node, by its number.
        logs: Where to write what all have printed.
        lab: Its hosts' network, if not a plain one.
    """

    def __init__(
        self,
        count: int,
        options: Options,
        *,
        patch: str = "",
        environment: Callable[[int], dict[str, str]] = lambda _: {},
        logs: Path | None = None,
        lab: NetLab | None = None,
    ) -> None:
        self.lab = lab or NetLab(count)
        self.options = options
        self.nodes: list[Node] = []
        self.trainers: list[Process] = []
        """All that were started, those that have ended too."""
        self._patch = patch
        self._logs = logs
        self._processes: list[Process] = []
        self._changed = threading.Condition()
        self._stack = contextlib.ExitStack()
        self._environment = inherited() | {
            "PMESH_KEY": new_key(),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "OPENBLAS_NUM_THREADS": "1",  # a fork of a process with threads is asking for trouble
        }
        self._environment_of = environment

    def __enter__(self) -> Self:
        try:
            # Short: a Unix socket's path may have 103 bytes.
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))
            self._stack.callback(self._write_logs)
            self._stack.enter_context(self.lab)
            for host in self.lab.hosts:
                home = Path(folder) / f"h{host.number}"
                home.mkdir(mode=0o700)
                warm = WarmStart(host, self._environment | self._environment_of(host.number))
                self._stack.callback(warm.close)
                self.nodes.append(Node(host, home, warm))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start_agent(self, node: Node) -> None:
        """`pmesh up` in the node's host; they find each other by mDNS."""
        up = ("up", "--name", node.name)
        node.agent = self._start(
            node,
            Order(
                kind="agent", arguments=up, environment=self.environment_of(node), patch=self._patch
            ),
        )

    def start_trainer(self, node: Node, **changed: Any) -> None:  # noqa: ANN401 - of Options
        """The training script; `changed` are options that differ for this one."""
        options = msgspec.structs.replace(self.options, number=node.host.number, **changed)
        text = msgspec.json.encode(options).decode()
        node.trainer = self._start(
            node, Order(kind="trainer", arguments=(text,), environment=self.environment_of(node))
        )
        self.trainers.append(node.trainer)

    def start(self, nodes: Iterable[Node] | None = None) -> None:
        """The agents and trainers that don't run; a trainer as soon as its agent answers."""
        nodes = list(self.nodes if nodes is None else nodes)
        for node in nodes:
            if not runs(node.agent):
                self.start_agent(node)
        for node in nodes:
            self.await_agent(node)
            if not runs(node.trainer):
                self.start_trainer(node)

    def await_agent(self, node: Node) -> None:
        """Until the node's agent says that it is up."""

        def is_up() -> bool:
            agents = node.processes(["agent"])
            return any(" is up, listening" in line for agent in agents for line in agent.printed())

        self.wait_for(is_up, f"{node.name}'s agent")

    def restart_all(self) -> None:
        """Begin anew: for after something has hung."""
        for node in self.nodes:
            self.lab.mend(node.host)
        self.restart(self.nodes)

    def restart(self, nodes: Sequence[Node], parts: Sequence[Part] = BOTH) -> None:
        """End these parts and start what is missing.

        A trainer that has outlived its agent comes back by itself.
        """
        self.end(nodes, parts)
        self.start(nodes)

    def end(self, nodes: Sequence[Node], parts: Sequence[Part] = BOTH) -> None:
        """Kill these parts of the nodes, and wait until they have ended."""
        for node in nodes:
            node.kill(*parts)
        ends = [process for node in nodes for process in node.processes(parts)]
        names = ", ".join(node.name for node in nodes)
        self.wait_for(lambda: all(end.ended for end in ends), f"the end of {names}'s processes")

    def leader(self) -> Node:
        """The node whose agent leads the view, as the last line about the ring has it."""
        rings = [agent.last_ring() for node in self.nodes for agent in node.processes(["agent"])]
        leader = max(rings, default=(0.0, ""))[1].rpartition("; leader ")[2]
        for node in self.nodes:
            if node.name == leader:
                return node
        raise CampaignError("nobody leads")

    def await_ops(
        self, count: int, nodes: Sequence[Node] | None = None, *, timeout_s: float = PATIENCE_S
    ) -> float:
        """Until each of these trainers has done so many ops with all of them; when that began."""
        nodes = self.nodes if nodes is None else nodes
        everybody = {node.name for node in nodes}
        began = time.monotonic()

        def steady() -> bool:
            for node in nodes:
                ops = node.life.ops.values()
                all_there = [op for op in ops if op.called >= began and set(op.names) == everybody]
                if len(all_there) < count:
                    return False
            return True

        self.wait_for(steady, f"{count} ops of {', '.join(sorted(everybody))}", timeout_s=timeout_s)
        return began

    def await_recovery(
        self, lives: Sequence[Life], at: float, what: str, *, timeout_s: float = PATIENCE_S
    ) -> float:
        """Until all of these have done the next op after a fault; how long that took."""
        self.wait_for(lambda: recovery_s(lives, at) is not None, what, timeout_s=timeout_s)
        return recovery_s(lives, at) or 0.0

    def await_called(self, nodes: Sequence[Node]) -> None:
        """Until all of them are in the middle of the same op, which has just begun."""
        began = time.monotonic()

        def together() -> bool:
            called = [{s for s, at in node.life.calls.items() if at >= began} for node in nodes]
            return bool(set[int].intersection(*called))

        self.wait_for(together, "an op that all have called")

    def wait_for(
        self, holds: Callable[[], bool], what: str, *, timeout_s: float = PATIENCE_S
    ) -> None:
        """Until this holds, looked at after each line that anybody prints.

        Raises:
            CampaignError: It does not in time.
        """
        with self._changed:
            if not self._changed.wait_for(holds, timeout_s):
                ended = [p.name for node in self.nodes for p in node.processes() if p.ended]
                dead = f"; ended: {', '.join(ended)}" if ended else ""
                raise CampaignError(f"{what} did not come within {timeout_s:g} s{dead}")

    def forget_ops(self, *, before: float) -> None:
        """Drop what has been checked, so that a long campaign stays quick."""
        with self._changed:
            for process in self._processes:
                if process.life is not None:
                    process.life.forget(before=before)
            self._processes = [p for p in self._processes if not p.ended or self._logs]

    def start_cold_agent(self, node: Node) -> None:
        """`pmesh up` as a user starts it, imports and all."""
        node.agent, _ = self.start_command(node, "up", "--name", node.name)

    def start_command(self, node: Node, *arguments: str) -> tuple[Process, subprocess.Popen[str]]:
        """A command of `pmesh` in the node's host, as a user starts it."""
        reading, writing = os.pipe()
        with os.fdopen(writing, "wb") as output:
            started = node.host.popen(
                [sys.executable, "-m", "pmesh.cli", *arguments],
                env=self.environment_of(node),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._stack.callback(started.wait)
        self._stack.callback(started.kill)
        name = f"pmesh {arguments[0]} of {node.name} ({started.pid})"
        return self._follow(Process(name, started.pid), reading), started

    def environment_of(self, node: Node) -> dict[str, str]:
        own = self._environment_of(node.host.number)
        return self._environment | own | {"PMESH_HOME": str(node.home)}

    def _start(self, node: Node, order: Order) -> Process:
        reading, writing = os.pipe()
        try:
            pid = node.warm.start(order, writing)
        finally:
            os.close(writing)
        process = Process(f"{order.kind} of {node.name} ({pid})", pid)
        if order.kind == "trainer":
            process.life = Life(node.name)
        return self._follow(process, reading)

    def _follow(self, process: Process, reading: int) -> Process:
        self._processes.append(process)
        threading.Thread(target=self._read, args=(process, reading), daemon=True).start()
        return process

    def _read(self, process: Process, reading: int) -> None:
        with os.fdopen(reading, encoding="utf-8", errors="replace") as stream:
            for line in stream:
                with self._changed:
                    self._hear(process, line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            process.ended = True
            self._changed.notify_all()

    def _hear(self, process: Process, line: str) -> None:
        report: Report | None = None
        if process.life is not None:
            report = decode_report(line)
            if report is not None:
                process.life.hear(report)
        if self._logs or report is None or report.what not in {"called", "done"}:
            process.lines.append((time.monotonic(), line))

    def _write_logs(self) -> None:
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
            for process in self._processes:
                text = "\n".join(f"{at:.3f} {line}" for at, line in process.lines)
                (self._logs / f"{process.name}.log").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
