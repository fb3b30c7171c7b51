"""Hosts of a lab with an agent and trainers each, which campaigns kill and restart."""

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tools.lab.commands import LabError
from tools.lab.mesh import BOTH, LabMesh, LabTrainer, Node, Part
from tools.lab.net import LabHost, NetLab
from tools.lab.oplog import Life, SeenOp, TrainerOptions, TrainerReport, recovery_s
from tools.lab.program import NEWS, LabProgram, await_that, runs
from tools.lab.warm import ForkOrder, Warm

PATIENCE_S = 30.0  # for what must happen; what takes longer has hung
TRAINER = "tools.chaos.trainer"
# What `pmesh up` imports only when it runs, and what the trainers are.
IMPORTED = ("pmesh.agent.run", "pmesh.cli.app", TRAINER)


def trainers_of(nodes: Iterable[Node]) -> list[LabTrainer]:
    """Return the present trainers of these nodes."""
    return [trainer for node in nodes for trainer in node.trainers]


def lives_of(nodes: Iterable[Node]) -> list[Life]:
    """Return the lives of the present trainers of these nodes."""
    return [trainer.life for trainer in trainers_of(nodes)]


def ops_of(
    nodes: Iterable[Node], counts: Callable[[SeenOp], bool] = lambda _: True
) -> dict[str, list[SeenOp]]:
    """What the nodes' present trainers have completed, by name, in the order of completion."""
    return {
        life.name: sorted(filter(counts, list(life.ops.values())), key=lambda op: op.done)
        for life in lives_of(nodes)
    }


def settled_ops(
    trainers: Iterable[LabTrainer], since: float, until: float
) -> tuple[dict[str, list[SeenOp]], dict[str, list[TrainerReport]]]:
    """What trainers of any time have completed and raised in this time, by their names.

    Without the last op of one that has ended, which perhaps alone had the result, and took it
    along; and without what a trainer did alone and knew to.
    """
    ops: dict[str, list[SeenOp]] = {}
    errors: dict[str, list[TrainerReport]] = {}
    for trainer in trainers:
        done = sorted(trainer.life.ops.values(), key=lambda op: op.done)
        ops[trainer.name] = [
            op
            for op in (done[:-1] if trainer.ended else done)
            if since < op.done <= until and not trainer.life.knew_to_be_alone(op)
        ]
        errors[trainer.name] = trainer.life.errors(since)
    return ops, errors


def _last_words(program: LabProgram) -> str:
    return ": ".join([program.name, *program.printed()[-1:]])


class LabCluster(LabMesh):
    """Nodes whose agents and trainers start warm, from `with` to its end.

    Args:
        count: How many nodes, with a trainer each; or how many trainers each node has.
        options: Of their trainers; each gets its own number.
        patch: Source that runs in each agent first.
        environment: Further variables of the programs of a node, by its number.
        logs: Where to write what all have printed.
        lab: Its hosts' network, if not a plain one.
    """

    def __init__(
        self,
        count: int | Sequence[int],
        options: TrainerOptions,
        *,
        patch: str = "",
        environment: Callable[[int], Mapping[str, str]] = lambda _: {},
        logs: Path | None = None,
        lab: NetLab | None = None,
    ) -> None:
        self._counts = (1,) * count if isinstance(count, int) else tuple(count)
        self.lab = lab or NetLab(len(self._counts))
        super().__init__(self.lab, patch=patch, environment=environment, logs=logs)
        self.options = options
        self.trainers: list[LabTrainer] = []
        """All that were started, those that have ended too."""
        self._warm: dict[str, Warm] = {}
        # A fork of a process with threads is asking for trouble.
        self._environment["OPENBLAS_NUM_THREADS"] = "1"

    def _add(self, host: LabHost) -> Node:
        node = super()._add(host)
        self._warm[node.name] = Warm(IMPORTED, node.environment, host)
        self._stack.callback(self._warm[node.name].close)
        return node

    def start_agent(self, node: Node, *options: str) -> None:
        """`pmesh up` in the node's host; they find each other by mDNS."""
        order = ForkOrder(
            program="pmesh.cli:main",
            arguments=("up", "--name", node.name, *options),
            environment=node.environment,
            patch=self._patch,
        )
        pid, output = self._warm[node.name].start(order)
        node.agent = LabProgram(f"agent of {node.name} ({pid})", pid, output)
        self.programs.append(node.agent)

    def start_cold_agent(self, node: Node) -> None:
        """`pmesh up` as a user starts it, imports and all."""
        super().start_agent(node)

    def start_trainer(self, node: Node, place: int = 0, **changed: Any) -> None:  # noqa: ANN401 - of Options
        """The training script; `changed` are options that differ for this one.

        Args:
            node: At which agent.
            place: Which of the node's trainers; the first, unless it has several.
            **changed: Of TrainerOptions.
        """
        options = msgspec.structs.replace(self.options, number=node.host.number, **changed)
        order = ForkOrder(
            program=f"{TRAINER}:main",
            arguments=(msgspec.json.encode(options).decode(),),
            environment=node.environment,
        )
        pid, output = self._warm[node.name].start(order)
        trainer = LabTrainer(
            f"trainer of {node.name} ({pid})",
            pid,
            output,
            life=Life(f"{node.name} trainer {place}" if place else node.name),
            keeps_all=self._logs is not None,
        )
        node.trainers[place : place + 1] = [trainer]
        self.programs.append(trainer)
        self.trainers.append(trainer)

    def start(self, nodes: Iterable[Node] | None = None) -> None:
        """The agents and trainers that don't run; trainers as soon as their agent answers."""
        nodes = list(self.nodes if nodes is None else nodes)
        for node in nodes:
            if not runs(node.agent):
                self.start_agent(node)
        for node in nodes:
            self.await_agent(node)
            for place in range(self._counts[self.nodes.index(node)]):
                if not any(map(runs, node.trainers[place : place + 1])):
                    self.start_trainer(node, place)

    def await_agent(self, node: Node) -> None:
        """Until the node's agent says that it is up."""

        def is_up() -> bool:
            agents = node.programs(["agent"])
            return any(" is up, listening" in line for agent in agents for line in agent.printed())

        self.wait_for(is_up, f"{node.name}'s agent")

    def restart_all(self) -> None:
        """Begin anew: for after something has hung."""
        for node in self.nodes:
            self.lab.mend(node.host)
        self.restart(self.nodes)

    def restart(
        self,
        nodes: Sequence[Node],
        parts: Sequence[Part] = BOTH,
        trainers: Sequence[LabTrainer] = (),
    ) -> None:
        """End these parts, or only these trainers, and start what is missing.

        A trainer that has outlived its agent comes back by itself.
        """
        self.end(nodes, parts, trainers)
        self.start(nodes)

    def end(
        self,
        nodes: Sequence[Node],
        parts: Sequence[Part] = BOTH,
        trainers: Sequence[LabTrainer] = (),
    ) -> None:
        """Kill these parts of the nodes, or only these trainers; wait until they have ended."""
        ends: Sequence[LabProgram] = trainers
        ends = ends or [program for node in nodes for program in node.programs(parts)]
        for program in ends:
            program.send_signal(signal.SIGKILL)
        names = ", ".join(node.name for node in nodes)
        self.wait_for(lambda: all(end.ended for end in ends), f"the end of {names}'s processes")

    def leader(self) -> Node:
        """The node whose agent leads the view, as the last line about the ring has it."""
        agents = [agent for node in self.nodes for agent in node.programs(["agent"])]
        rings = [agent.last_line("ring: ") for agent in agents]
        leader = max(rings)[1].rpartition("; leader ")[2]
        for node in self.nodes:
            if node.name == leader:
                return node
        raise LabError("nobody leads")

    def await_ops(
        self, count: int, nodes: Sequence[Node] | None = None, *, timeout_s: float = PATIENCE_S
    ) -> float:
        """Until each of these trainers has done so many ops with all of them; when that began."""
        nodes = self.nodes if nodes is None else nodes
        lives = lives_of(nodes)
        everybody = sorted(node.name for node in nodes for _ in node.trainers)
        began = time.monotonic()

        def steady() -> bool:
            for life in lives:
                since = [op for op in life.ops.values() if op.called >= began]
                if sum(sorted(op.names) == everybody for op in since) < count:
                    return False
            return True

        self.wait_for(steady, f"{count} ops of {', '.join(everybody)}", timeout_s=timeout_s)
        return began

    def await_recovery(
        self, lives: Sequence[Life], at: float, what: str, *, timeout_s: float = PATIENCE_S
    ) -> float:
        """Until all of these have done the next op after a fault; how long that took."""
        self.wait_for(lambda: recovery_s(lives, at) is not None, what, timeout_s=timeout_s)
        return recovery_s(lives, at) or 0.0

    def await_called(self, nodes: Sequence[Node]) -> None:
        """Until all of them are in the middle of the same op, which has just begun."""
        lives, began = lives_of(nodes), time.monotonic()

        def together() -> bool:
            called = [{s for s, at in each.calls.items() if at >= began} for each in lives]
            return bool(set[int].intersection(*called))

        self.wait_for(together, "an op that all have called")

    def wait_for(
        self, holds: Callable[[], bool], what: str, *, timeout_s: float = PATIENCE_S
    ) -> None:
        """Until this holds; raises LabError, with the last line of who has ended, if it is late."""
        try:
            await_that(holds, what, within_s=timeout_s)
        except LabError as e:
            ended = [_last_words(p) for node in self.nodes for p in node.programs() if p.ended]
            raise LabError(f"{e}; ended: {', '.join(ended)}" if ended else str(e)) from None

    def forget_ops(self, *, before: float) -> None:
        """Drop what has been checked, so that a long campaign stays quick."""
        with NEWS:
            for trainer in self.trainers:
                trainer.life.forget(before=before)
            self.forget_ended()
