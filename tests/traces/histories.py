"""Jobs whose true times are known, as machines with clocks of their own would tell them."""

from dataclasses import dataclass

from hypothesis import strategies as st

from pmesh.core.jobs.op_times import OpTime
from pmesh.core.links.clocks import Reading
from pmesh.ids import JobName, TrainerId
from pmesh.traces.wire import Cursor, RankOps, TracedMachine, TracedOps

BEGAN_US = 10**9
JOB = JobName("digits")


@dataclass(frozen=True)
class TraceHistory:
    """What one `pmesh trace` gets, and the least that is true of it."""

    machines: tuple[TracedMachine, ...]
    traced: tuple[TracedOps, ...]
    until_us: int


def told(
    machine: int,
    times: tuple[OpTime, ...],
    *,
    rank: int | None = None,
    job: JobName = JOB,
    run: int = 1,
) -> TracedOps:
    place = machine if rank is None else rank
    last = Cursor(job, run, TrainerId(place), len(times))
    return TracedOps(machine, RankOps(last, place, 100 + place, times))


def machine(
    place: int, offset_us: int = 0, error_us: int = 0, *, me: bool = False
) -> TracedMachine:
    """A machine whose clock shows more than ours, as two heartbeats have told it."""
    clock = tuple(Reading(at + offset_us, at, error_us) for at in (BEGAN_US, BEGAN_US + 60 * 10**6))
    return TracedMachine(name=f"mac-{place}", me=me, clock=() if me else clock)


def op(
    number: int, began_us: int, ended_us: int, kind: str = "all_reduce", *, nbytes: int = 4096
) -> OpTime:
    took_us = ended_us - began_us
    return OpTime(number, began_us, nbytes, took_us, 0, kind, completed=True)


def message(
    kind: str, began_us: int, ended_us: int, *, peer: int, number: int = 0, tag: int = 3
) -> OpTime:
    took_us = ended_us - began_us
    return OpTime(number, began_us, 4096, took_us, 0, kind, completed=True, peer=peer, tag=tag)


@st.composite
def histories(draw: st.DrawFn) -> TraceHistory:
    """Up to four ranks, each on a machine of its own, that make the same calls.

    The ranks compute, call, and get the result once all have called. The clocks are off by
    anything, and known up to an error.
    """
    size, calls = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    kinds = draw(st.lists(st.sampled_from(["all_reduce", "barrier"]), min_size=calls))[:calls]
    spans = st.integers(0, 2_000_000)
    machines, offsets = [machine(0, me=True)], [0]
    for place in range(1, size):
        offset_us, error_us = draw(st.integers(-(10**9), 10**9)), draw(st.integers(0, 50_000))
        wrong_us = draw(st.integers(-error_us, error_us))
        machines.append(machine(place, offset_us + wrong_us, error_us))
        offsets.append(offset_us)
    now_us = [BEGAN_US] * size
    times: list[list[OpTime]] = [[] for _ in range(size)]
    for number, kind in enumerate(kinds):
        starts = [at + draw(spans) for at in now_us]
        now_us = [max(starts) + draw(spans) for _ in range(size)]
        for rank, (start, end) in enumerate(zip(starts, now_us, strict=True)):
            times[rank].append(op(number, start + offsets[rank], end + offsets[rank], kind))
    traced = tuple(told(rank, tuple(each)) for rank, each in enumerate(times))
    return TraceHistory(tuple(machines), traced, max(now_us))
