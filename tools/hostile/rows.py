"""The rows of the table that are measured beside a control, each with its bar."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tools.hostile.attackers import Mix, Order
from tools.hostile.turns import Measured, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One attack, and what it may cost at most; infinity where its bar says nothing."""

    name: str
    what: str
    kind: str
    seconds: float
    per_second: float
    """Packets, names or connections."""
    mix: Mix = "all"
    least_ratio: float = 0.0
    """Of the control's ops/s."""
    most_slower_s: float = math.inf
    """The slowest op above the control's."""
    most_descriptors: float = math.inf
    most_mib: float = math.inf
    most_join_s: float = 10.0
    most_rest_s: float = math.inf

    def order(self, *, seconds: float | None) -> Order:
        seconds = seconds or self.seconds
        count = round(self.per_second * seconds)
        return Order(kind=self.kind, seconds=seconds, count=count, mix=self.mix)

    def judge(self, measured: Measured) -> Iterator["Judged"]:
        """Each figure with its limit, as the table shows them."""
        control, attack = map(Turn.median_of, measured)
        yield Judged("ops/s", f"{control.ops_per_s:.0f} → {attack.ops_per_s:.0f}", met=True)
        yield Judged("ratio", f"{measured.ratio:.2f}", measured.ratio >= self.least_ratio)
        slower = attack.slowest_s - control.slowest_s
        yield Judged("slowest op", f"{slower:+.2f} s", slower <= self.most_slower_s)
        more = attack.more_descriptors
        yield Judged("descriptors", f"{more:+.0f}", more <= self.most_descriptors)
        yield Judged("memory", f"{attack.more_mib:+.1f} MiB", attack.more_mib <= self.most_mib)
        yield Judged("join", f"{attack.join_s:.1f} s", attack.join_s <= self.most_join_s)
        yield Judged("at rest", f"{attack.rest_s:.1f} s", attack.rest_s <= self.most_rest_s)
        faults = control.faults + attack.faults
        yield Judged("faults", f"{len(faults)}", not faults)


@dataclass(frozen=True, slots=True)
class Judged:
    name: str
    value: str
    met: bool


def _flood(name: str, what: str, per_second: float, mix: Mix = "all") -> Row:
    return Row(
        name=name,
        what=what,
        kind="mdns",
        mix=mix,
        seconds=60.0,
        per_second=per_second,
        least_ratio=0.9,
        most_slower_s=0.2,
        most_descriptors=20,
        most_mib=10,
        most_rest_s=5.0,
    )


ROWS = (
    _flood("mdns-53", "mDNS by a stranger: 53 packets (1,000 records) a second", 53),
    _flood("mdns-300", "300 machines a second announced and withdrawn", 600, "invented"),
    _flood("mdns-1000", "1,000 packets (19,000 records) a second", 1000),
    _flood("junk", "1,000 altered and broken mDNS packets a second", 1000, "junk"),
    Row(
        name="names",
        what="a member names 25,600 machines and leaves",
        kind="member",
        seconds=20.0,
        per_second=1280,
        least_ratio=0.8,
        most_join_s=math.inf,
        most_rest_s=5.0,
    ),
    Row(
        name="announced",
        what="a member announces and withdraws 100 machines a second by mDNS",
        kind="mdns",
        mix="member",
        seconds=20.0,
        per_second=200,
        least_ratio=0.8,
        most_rest_s=5.0,
    ),
    Row(
        name="door",
        what="5,000 connections of strangers that are silent, slow or send garbage",
        kind="knock",
        seconds=20.0,
        per_second=250,
        most_descriptors=66,  # of 90 in all; a resting agent has 24
        most_mib=16,
    ),
    Row(
        name="local",
        what="a trainer that sends garbage, 200 times a second; another user at the socket",
        kind="local",
        seconds=10.0,
        per_second=200,
        most_mib=16,
    ),
    Row(
        name="anything",
        what="a member that sends anything at full pace, beside a job in which it has no rank",
        kind="anything",
        seconds=60.0,
        per_second=0,
        least_ratio=0.8,
        most_descriptors=64,
        most_mib=64,
        most_join_s=math.inf,
        most_rest_s=5.0,
    ),
)
