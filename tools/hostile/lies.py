"""A member that lies to all, while honest machines are killed and come back."""

import statistics
import time
from pathlib import Path
from random import Random

from tools.hostile.liar import EVERY, PATCH, SEED_VARIABLE
from tools.hostile.rows import Judged
from tools.hostile.turns import OP_BYTES, last_words
from tools.lab.cluster import Cluster, settled_ops
from tools.lab.commands import LabError
from tools.lab.oplog import Options, find_violations
from tools.lab.program import Program

HONEST = 3
LIAR = HONEST + 1
LIARS = 3  # at most, between two kills: who is banned comes back under another node key
LIES_S = 1.0
HEALED_S = 30.0  # together again, with the liar or after it has gone
MOST_HANGS = 3


def run_lies(views: int, seed: int, logs: Path | None) -> list[Judged]:
    """Until it has told so many false views, or the honest ones did not come together 3 times."""
    options = Options(number=0, wait_for=HONEST, op_bytes=OP_BYTES)

    def environment(number: int) -> dict[str, str]:
        return {SEED_VARIABLE: str(seed)} if number == LIAR else {}

    with Cluster(LIAR, options, patch=PATCH, environment=environment, logs=logs) as cluster:
        campaign = _Lies(cluster, Random(seed))  # noqa: S311 - repeats a run
        campaign.begin()
        while campaign.told < views and len(campaign.hangs) < MOST_HANGS:
            campaign.kill_one()
        return campaign.judge(views)


class _Lies:
    def __init__(self, cluster: Cluster, random: Random) -> None:
        self._cluster = cluster
        self._honest, self._liar = cluster.nodes[:HONEST], cluster.nodes[HONEST]
        self._random = random
        self._liars: list[Program] = []
        self.hangs: list[str] = []
        self._deaths: list[str] = []
        self._errors: list[str] = []
        self._wrong: list[str] = []
        self._kills = self._stops = self._checked = 0
        self._clean_rate = 0.0
        self._rates: list[float] = []
        self._checked_until = 0.0

    @property
    def told(self) -> int:
        """How many false views, by all liars so far."""
        lines = [line for liar in self._liars for line in liar.printed()]
        return EVERY * sum(line.startswith("lied ") for line in lines)

    def begin(self) -> None:
        """The honest ones train before the liar comes."""
        self._cluster.start(self._honest)
        since = self._cluster.await_ops(20, self._honest)
        time.sleep(LIARS * LIES_S)
        self._clean_rate = self._ops_per_s(since)
        self._start_liar()

    def kill_one(self) -> None:
        """Kill an honest machine and start it again; if they do not come together, the liar too."""
        since = time.monotonic()
        for _ in range(LIARS):
            time.sleep(LIES_S)
            if self._random.random() < 0.5:  # noqa: PLR2004 - a coin
                self._renew_liar()
        self._rates.append(self._ops_per_s(since))
        victim = self._random.choice(self._honest)
        self._note_deaths()
        self._kills += 1
        try:
            self._cluster.end([victim])
            self._cluster.start(self._honest)
            self._cluster.await_ops(3, self._honest, timeout_s=HEALED_S)
        except LabError:
            self._stops += 1
            self._go_on_without_liar()
        if self._liar.agent is None or self._liar.agent.ended:
            self._renew_liar()
        self._check()

    def _go_on_without_liar(self) -> None:
        """The worst that it may do is to stop the job until it is gone."""
        self._cluster.end([self._liar])
        self._note_deaths()
        try:
            self._cluster.start(self._honest)
            self._cluster.await_ops(3, self._honest, timeout_s=HEALED_S)
        except LabError as e:
            self.hangs.append(str(e))
            self._check()
            self._cluster.trainers.clear()  # another job of the same steps
            self._cluster.restart(self._honest)
            self._cluster.await_ops(3, self._honest)

    def _renew_liar(self) -> None:
        """Under another node key, which whoever holds the mesh key can make at will."""
        self._cluster.end([self._liar])
        (self._liar.home / "node_key").unlink(missing_ok=True)
        self._start_liar()

    def _ops_per_s(self, since: float) -> float:
        now = time.monotonic()
        ops = list(self._honest[0].life.ops.values())
        return sum(op.done > since for op in ops) / (now - since)

    def _start_liar(self) -> None:
        self._cluster.start_agent(self._liar)
        if self._liar.agent is not None:
            self._liars.append(self._liar.agent)

    def _note_deaths(self) -> None:
        for node in self._honest:
            if node.agent is not None and node.agent.ended:
                self._deaths.append(f"{node.name}: {last_words(node.agent)}")

    def _check(self) -> None:
        until = time.monotonic() - 0.5  # later ops may still be reported by others
        ops, errors = settled_ops(self._cluster.trainers, self._checked_until, until)
        for name, counted in ops.items():
            self._checked += len(counted)
            alone = [op.step for op in counted if len(op.names) == 1]
            if alone:
                steps = f"steps {alone[0]} to {alone[-1]}"
                self._wrong.append(f"{name} was alone without an error, {steps}")
            self._errors += [f"{name}: {error.says}" for error in errors[name]]
        self._wrong += find_violations(ops)
        self._cluster.forget_ops(before=until)
        self._checked_until = until

    def judge(self, views: int) -> list[Judged]:
        """What it has come to; the first of each kind is printed."""
        self._note_deaths()
        for kind in (self._deaths, self.hangs, self._wrong, self._errors):
            print("\n".join(f"    {fault}" for fault in kind[:3]))
        rate = statistics.median(self._rates or [0.0])
        return [
            Judged("views", f"{self.told:,}", met=self.told >= views),
            Judged(
                "ops/s", f"{self._clean_rate:.0f} → {rate:.0f}", met=2 * rate >= self._clean_rate
            ),
            Judged("kills", f"{self._kills}", met=True),
            Judged("ops checked", f"{self._checked:,}", met=self._checked > 0),
            Judged("stopped until it was gone", f"{self._stops} times", met=True),
            Judged("told by an error", f"{len(self._errors)} times", met=True),
            Judged("agents that died", f"{len(self._deaths)}", met=not self._deaths),
            Judged("not together again", f"{len(self.hangs)} times", met=not self.hangs),
            Judged("alone or torn", f"{len(self._wrong)} times", met=not self._wrong),
        ]
