"""Judges what makes machines slow, or lets them fall asleep: none of it keeps them apart."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pmesh.agent.schema import HeldOffStatus, MemberStatus
from pmesh.cli.doctor.rules.findings import Finding, not_looked_at, remark, well
from pmesh.cli.troubles import (
    describe_bad_links,
    describe_held_off,
    describe_names,
    describe_slow_paths,
)
from pmesh.core.identity.advertisement import FRESH_MINUTES
from pmesh.core.wire import aead
from pmesh.native import describe

_MINUTES_A_DAY = 24 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeFacts:
    """Why a process works without what makes it fast; empty texts if none does."""

    agent: str = ""
    command: str = ""
    """Of this command, and so of training scripts with the same Python."""
    encryption: str = ""


def judge_native(facts: NativeFacts) -> Iterator[Finding]:
    for who, missing in (("the agent", facts.agent), ("a script", facts.command)):
        if missing:
            why, _, todo = missing.partition("; ")
            yield remark(f"{who} works {describe(why)}", means="It is slower.", todo=todo)
    if facts.encryption:
        why, _, todo = facts.encryption.partition("; ")
        yield remark(f"the agent {aead.describe(why)}", todo=todo)
    if not any((facts.agent, facts.command, facts.encryption)):
        yield well("the native library and AES instructions are used")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFacts:
    """How many minutes the clock of another machine is ahead of this one's."""

    name: str
    ahead_minutes: int


def judge_clocks(clocks: Sequence[ClockFacts]) -> Iterator[Finding]:
    apart = [clock for clock in clocks if abs(clock.ahead_minutes) > FRESH_MINUTES]
    whose = "this machine" if apart and len(apart) == len(clocks) > 1 else "one of the two"
    for clock in apart:
        direction = "ahead" if clock.ahead_minutes > 0 else "behind"
        yield remark(
            f"the clock of {clock.name} is {_time_text(abs(clock.ahead_minutes))} {direction}",
            means="Links do not need the clock. But an announcement that looks old is not "
            "believed when an address changes, and the times of logs don't agree. The wrong clock "
            f"is that of {whose}.",
            todo="macOS: sudo sntp -sS time.apple.com; Linux: sudo timedatectl set-ntp true",
        )
    if not clocks:
        yield not_looked_at("no other machine of this mesh was heard by mDNS")
    elif not apart:
        yield well(f"this clock agrees with that of {', '.join(clock.name for clock in clocks)}")


def _time_text(minutes: int) -> str:
    if minutes < 2 * _MINUTES_A_DAY:
        return f"{minutes} minutes"
    return f"{minutes // _MINUTES_A_DAY} days"


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepFacts:
    """When this machine falls asleep by itself."""

    after: str = ""
    """Such as "10 minutes without input"; empty if it does not."""
    todo: str = ""
    low_power: bool = False
    """macOS has lowered the speed of the processor."""
    unseen: str = ""
    """Why that is not known; empty if it is."""


def judge_sleep(facts: SleepFacts) -> Iterator[Finding]:
    if facts.after:
        yield remark(
            f"this machine falls asleep after {facts.after}",
            means="The others lose it then, and its training stops until it is awake.",
            todo=facts.todo,
        )
    if facts.low_power:
        yield remark(
            "Low Power Mode is on", means="It computes slower.", todo="sudo pmset -a lowpowermode 0"
        )
    if facts.unseen:
        yield not_looked_at(facts.unseen)
    elif not facts.after and not facts.low_power:
        yield well("this machine does not fall asleep by itself")


def judge_speed(
    members: Sequence[MemberStatus], held_off: Sequence[HeldOffStatus]
) -> Iterator[Finding]:
    """Judge what the agent says of its links and of the names of machines."""
    slow = [remark(text, means="Training is as slow.") for text in describe_slow_paths(members)]
    rest = (*describe_bad_links(members), *describe_held_off(held_off))
    names = (text.partition("; ") for text in describe_names(members))
    others = [
        *(remark(found, means=f"{then}.") for found, _, then in (t.partition("; ") for t in rest)),
        *(remark(found, todo=todo) for found, _, todo in names),
    ]
    yield from (*slow, *others)
    if not slow and not others:
        yield well("no link is slower than its cable, as far as it was measured")
