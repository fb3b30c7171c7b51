"""What must disturb nobody: pauses, busy cores, lost packets, wrong clocks."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.chaos.cluster import Cluster, Node
from tools.chaos.episodes import CLEAN_OPS, Run, Tally
from tools.chaos.faults import Part
from tools.chaos.oplog import clean_ops_s, find_violations, longest_gap_s

PAUSE_S = 1.0
MINUTE_S = 60.0
LOST_PERCENT = 2.0
PAUSED: tuple[tuple[Part, ...], ...] = (("agent",), ("trainer",), ("agent", "trainer"))

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


def run_pauses(run: Run) -> Tally:
    """SIGSTOP for a second to an agent, a trainer or both, then SIGCONT."""
    random = run.random()
    tally = Tally()
    with Cluster(4, run.options(), logs=run.logs) as cluster:
        cluster.start()
        cluster.await_ops(1)  # before, views come and go: they find each other one by one
        for number in range(run.episodes):
            began = cluster.await_ops(CLEAN_OPS)
            lives = [node.life for node in cluster.nodes]
            tally.clean_s += clean_ops_s(lives, since=began, until=time.monotonic())
            cluster.await_called(cluster.nodes)
            victim, parts = random.choice(cluster.nodes), PAUSED[number % len(PAUSED)]
            at = time.monotonic()
            _signal(victim, parts, signal.SIGSTOP)
            time.sleep(PAUSE_S)
            _signal(victim, parts, signal.SIGCONT)
            what = f"the next op, after a pause of {' and '.join(parts)} of {victim.name}"
            tally.recovery_s.append(cluster.await_recovery(lives, at, what))
            check_undisturbed(cluster, tally, since=began)
            cluster.forget_ops(before=began)
    return tally


def run_pegged(run: Run) -> Tally:
    """All cores busy with other work, twice as many processes as cores, for a minute."""
    return _run_disturbed(run, lambda _: _busy_processes(2 * (os.cpu_count() or 1)))


def run_losses(run: Run) -> Tally:
    """Each packet is lost with 2 % probability, whichever way it goes, for a minute."""

    @contextlib.contextmanager
    def lossy(cluster: Cluster) -> Iterator[None]:
        cluster.lab.lose(LOST_PERCENT)
        try:
            yield
        finally:
            cluster.lab.lose(0)

    return _run_disturbed(run, lossy)


def run_wrong_clocks(run: Run) -> Tally:
    """The wall clock of each node a day off its neighbour's, and jumping by a day each second."""
    with tempfile.TemporaryDirectory(prefix="chaos-clock-") as folder:
        library = Path(folder) / "clock.so"
        compiler = ["cc", "-shared", "-fPIC", "-nostdlib", "-w", "-x", "c", "-", "-o", str(library)]
        subprocess.run(compiler, input=WRONG_CLOCK, text=True, check=True)

        def environment(number: int) -> dict[str, str]:
            return {"LD_PRELOAD": str(library), "CHAOS_CLOCK_DAYS": str(number)}

        return _run_disturbed(run, lambda _: contextlib.nullcontext(), environment=environment)


def check_undisturbed(cluster: Cluster, tally: Tally, *, since: float) -> None:
    """All ops since then right and alike, with all nodes in each; nobody expelled, no error."""
    everybody = {node.name for node in cluster.nodes}
    ops = {
        node.name: sorted(
            (op for op in list(node.life.ops.values()) if op.called >= since),
            key=lambda op: op.step,
        )
        for node in cluster.nodes
    }
    tally.ops_checked += sum(map(len, ops.values()))
    tally.violations += find_violations(ops, survivors=ops)
    for node in cluster.nodes:
        missed = {name for op in ops[node.name] for name in everybody - set(op.names)}
        if missed:
            tally.violations.append(f"{node.name} has done ops without {', '.join(sorted(missed))}")
        tally.violations += [f"{node.name}: {e.says}" for e in node.life.errors(since)]
        printed = node.agent.printed(since=since) if node.agent else []
        tally.violations += [f"{node.name}: {line}" for line in printed if " is gone" in line]


def _run_disturbed(
    run: Run,
    disturbed: Callable[[Cluster], contextlib.AbstractContextManager[None]],
    *,
    environment: Callable[[int], dict[str, str]] = lambda _: {},
) -> Tally:
    """Minutes of ops, each after some undisturbed ones; one episode is one minute."""
    tally = Tally()
    gaps: list[float] = []
    with Cluster(4, run.options(), environment=environment, logs=run.logs) as cluster:
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
            done = [op.done for life in lives for op in life.ops.values()]
            gaps.append(longest_gap_s(done, since=struck, until=until))
            check_undisturbed(cluster, tally, since=began)
            cluster.forget_ops(before=time.monotonic())
    tally.facts = {"ops meanwhile": len(tally.recovery_s), "longest gap between ops, s": max(gaps)}
    return tally


@contextlib.contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _signal(node: Node, parts: tuple[Part, ...], number: signal.Signals) -> None:
    for part in parts:
        process = node.agent if part == "agent" else node.trainer
        if process is not None:
            process.send(number)
