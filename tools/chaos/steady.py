"""What must disturb nobody: pauses, busy cores, losses, wrong clocks; and stopped trainers."""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.chaos.episodes import ANY_PARTS
from tools.lab.campaign import CampaignRun, Tally
from tools.lab.cluster import LabCluster, ops_of
from tools.lab.mesh import Node
from tools.lab.oplog import clean_ops_s, longest_gap_s
from tools.lab.program import keep_busy

PAUSE_S = 1.0
MINUTE_S = 60.0
LOST_PERCENT = 2.0

# Without any header, which a machine that has a compiler need not have. The wall clock is off by as
# many days as the variable says, and jumps by a day every second; other clocks stay as they are.
WRONG_CLOCK = """
struct timespec { long seconds, nanoseconds; };
struct timeval { long seconds, microseconds; };
void *dlsym(void *, const char *);
char *getenv(const char *);
long atol(const char *);
#define NEXT(name) dlsym((void *)-1L, name)
static int real(int clock, struct timespec *at) {
    return ((int (*)(int, struct timespec *))NEXT("clock_gettime"))(clock, at);
}
static long shift(void) {
    struct timespec now;
    char *days = getenv("CHAOS_CLOCK_DAYS");
    real(1, &now); /* CLOCK_MONOTONIC */
    return ((days ? atol(days) : 0) + now.seconds % 2) * 86400;
}
int clock_gettime(int clock, struct timespec *at) {
    int result = real(clock, at);
    if (!result && (clock == 0 || clock == 5)) at->seconds += shift(); /* CLOCK_REALTIME[_COARSE] */
    return result;
}
long time(long *at) {
    long now = ((long (*)(long *))NEXT("time"))(0) + shift();
    if (at) *at = now;
    return now;
}
int gettimeofday(struct timeval *at, void *zone) {
    int result = ((int (*)(struct timeval *, void *))NEXT("gettimeofday"))(at, zone);
    if (!result) at->seconds += shift();
    return result;
}
"""


def run_pauses(run: CampaignRun) -> Tally:
    """SIGSTOP for a second to an agent, a trainer or both, then SIGCONT."""
    random = run.random()
    tally = Tally()
    with LabCluster(4, run.options(), logs=run.logs) as cluster:
        cluster.start()
        cluster.await_ops(1)  # before, views come and go: they find each other one by one
        for number in range(run.episodes):
            began = tally.await_clean(cluster)
            lives = [node.life for node in cluster.nodes]
            cluster.await_called(cluster.nodes)
            victim, parts = random.choice(cluster.nodes), ANY_PARTS[number % len(ANY_PARTS)]
            at = time.monotonic()
            victim.send(signal.SIGSTOP, parts)
            time.sleep(PAUSE_S)
            victim.send(signal.SIGCONT, parts)
            what = f"the next op, after a pause of {' and '.join(parts)} of {victim.name}"
            tally.recovery_s.append(cluster.await_recovery(lives, at, what))
            check_undisturbed(cluster, tally, since=began)
            cluster.forget_ops(before=began)
    return tally


def run_pegged(run: CampaignRun) -> Tally:
    """All cores busy with other work, twice as many processes as cores, for a minute."""
    return _run_disturbed(run, lambda _: keep_busy(2 * (os.cpu_count() or 1)))


def run_losses(run: CampaignRun) -> Tally:
    """Each packet is lost with 2 % probability, whichever way it goes, for a minute."""

    @contextlib.contextmanager
    def lossy(cluster: LabCluster) -> Iterator[None]:
        cluster.lab.lose(LOST_PERCENT)
        try:
            yield
        finally:
            cluster.lab.lose(0)

    return _run_disturbed(run, lossy)


def run_wrong_clocks(run: CampaignRun) -> Tally:
    """The wall clock of each node a day off its neighbour's, and jumping by a day each second."""
    with tempfile.TemporaryDirectory(prefix="chaos-clock-") as folder:
        library = Path(folder) / "clock.so"
        compiler = ["cc", "-shared", "-fPIC", "-nostdlib", "-w", "-x", "c", "-", "-o", str(library)]
        subprocess.run(compiler, input=WRONG_CLOCK, text=True, check=True)

        def environment(number: int) -> dict[str, str]:
            return {"LD_PRELOAD": str(library), "CHAOS_CLOCK_DAYS": str(number)}

        return _run_disturbed(run, lambda _: contextlib.nullcontext(), environment=environment)


def check_undisturbed(cluster: LabCluster, tally: Tally, *, since: float) -> None:
    """All ops since then right and alike, with all nodes in each; nobody expelled, no error."""
    everybody = {node.name for node in cluster.nodes}
    ops = ops_of(cluster.nodes, lambda op: op.called >= since)
    tally.check(ops, survivors=ops)
    tally.note_errors(cluster.nodes, since)
    for node in cluster.nodes:
        missed = {name for op in ops[node.name] for name in everybody - set(op.names)}
        if missed:
            tally.violations.append(f"{node.name} has done ops without {', '.join(sorted(missed))}")
        printed = [line for p in node.programs(["agent"]) for line in p.printed(since=since)]
        tally.violations += [f"{node.name}: {line}" for line in printed if " is gone" in line]


def _run_disturbed(
    run: CampaignRun,
    disturbed: Callable[[LabCluster], contextlib.AbstractContextManager[None]],
    *,
    environment: Callable[[int], dict[str, str]] = lambda _: {},
) -> Tally:
    """Minutes of ops, each after some undisturbed ones; one episode is one minute."""
    tally = Tally()
    gaps: list[float] = []
    with LabCluster(4, run.options(), environment=environment, logs=run.logs) as cluster:
        cluster.start()
        cluster.await_ops(1)
        for _ in range(run.episodes):
            began = cluster.await_ops(10)
            lives = [node.life for node in cluster.nodes]
            tally.clean_s += clean_ops_s(lives, since=began, until=time.monotonic())
            with disturbed(cluster):
                struck = time.monotonic()
                while time.monotonic() < struck + MINUTE_S and not tally.violations:
                    time.sleep(0.5)
                    tally.violations += [f"{x.name}: {e.says}" for x in lives for e in x.errors(0)]
                until = time.monotonic()
            cluster.await_ops(1)
            ops = clean_ops_s(lives, since=struck, until=until)
            tally.recovery_s += ops
            done = [op.done for life in lives for op in list(life.ops.values())]
            gaps.append(longest_gap_s(done, since=struck, until=until))
            check_undisturbed(cluster, tally, since=began)
            cluster.forget_ops(before=time.monotonic())
    tally.facts = {"ops meanwhile": len(tally.recovery_s), "longest gap between ops, s": max(gaps)}
    return tally


STRAGGLER_AFTER_S = 4.0
"""As the trainers of this campaign ask for; the default, a minute, would only take longer."""
COMPUTES_S = 3 * STRAGGLER_AFTER_S
_STEP = 12


def run_stopped_trainers(run: CampaignRun) -> Tally:
    """SIGSTOP to a trainer, for good; its agent and its socket stay."""
    random = run.random()
    tally = Tally()
    told: list[float] = []
    options = run.options(straggler_after_s=STRAGGLER_AFTER_S)
    with LabCluster(4, options, logs=run.logs) as cluster:
        cluster.start()
        for _ in range(run.episodes):
            began = tally.await_clean(cluster)
            lives = [node.life for node in cluster.nodes]
            cluster.await_called(cluster.nodes)
            victim = random.choice(cluster.nodes)
            others = [node for node in cluster.nodes if node is not victim]
            at = time.monotonic()
            victim.send(signal.SIGSTOP, ["trainer"])
            lives = [node.life for node in others]
            what = f"the next op without {victim.name}, which is stopped"
            patience_s = STRAGGLER_AFTER_S + 15.0
            took = cluster.await_recovery(lives, at, what, timeout_s=patience_s)
            if took < STRAGGLER_AFTER_S / 2:
                # Its agent has ended the op that it had called; the next one waits for it.
                again = time.monotonic()
                took = again - at
                took += cluster.await_recovery(lives, again, what, timeout_s=patience_s)
            tally.recovery_s.append(took)
            told += [_told_s(node, victim, at) for node in others]
            cluster.restart([victim], ["trainer"])
            cluster.await_ops(1)
            ops = ops_of(others)
            tally.check(ops, survivors=ops)
            tally.note_errors(others, at)
            cluster.forget_ops(before=began)
    tally.facts = {
        "straggler_after, s": STRAGGLER_AFTER_S,
        "slowest to be told by name, s": max(told),
        "first to go on, s": min(tally.recovery_s),
    }
    return tally


def run_computing_trainers(run: CampaignRun) -> Tally:
    """A trainer that computes for three times `straggler_after` between two calls."""
    tally = Tally()
    options = run.options(straggler_after_s=STRAGGLER_AFTER_S)
    for _ in range(run.episodes):
        with LabCluster(4, options, logs=run.logs) as cluster:
            for node in cluster.nodes:
                cluster.start_agent(node)
            for node in cluster.nodes:
                cluster.await_agent(node)
                slow = node is cluster.nodes[1]
                computes_s = COMPUTES_S if slow else 0.0
                cluster.start_trainer(node, compute_at_step=_STEP, compute_s=computes_s)
            lives = [node.life for node in cluster.nodes]
            cluster.wait_for(
                lambda lives=lives: all(_STEP + 2 in life.ops for life in lives),  # type: ignore[misc]
                "the ops after a long computation",
                timeout_s=COMPUTES_S + 30.0,
            )
            tally.recovery_s.append(lives[0].ops[_STEP].done - lives[0].ops[_STEP].called)
            check_undisturbed(cluster, tally, since=0.0)
    tally.facts = {"straggler_after, s": STRAGGLER_AFTER_S, "computed, s": COMPUTES_S}
    return tally


def _told_s(node: Node, victim: Node, at: float) -> float:
    """When this node, by its agent or in its trainer, first said who is stopped; else infinity."""
    told = [
        when - at
        for part in node.programs()
        for when, line in list(part.lines)
        if when >= at and victim.name in line and re.search(r"\bstopped\b", line)
    ]
    return min(told, default=float("inf"))
