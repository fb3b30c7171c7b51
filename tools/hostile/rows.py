"""The attacks, each beside a control that sends the same to nobody, and what each may cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from tools.hostile.attackers import AttackOrder, Mix
from tools.hostile.turns import run_turns
from tools.lab.campaign import Campaign, CampaignRun, Tally
from tools.lab.measured import Measured

SHORT_S = 5.0
JOINS_S = {"join, s": 10.0}
RESTS_S = {"at rest again after, s": 5.0}


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack, and what it may cost at most."""

    name: str
    what: str
    kind: str
    seconds: float
    per_second: float
    """Packets, names or connections."""
    most: Mapping[str, float]
    """Of facts, by their names."""
    least_ratio: float = 0.0
    """Of the control's ops/s."""
    mix: Mix = "all"

    def order(self, *, seconds: float | None = None) -> AttackOrder:
        seconds = seconds or self.seconds
        count = round(self.per_second * seconds)
        return AttackOrder(kind=self.kind, seconds=seconds, count=count, mix=self.mix)

    def missed(self, facts: Mapping[str, float]) -> list[str]:
        """The names of the facts that are beyond their limits."""
        found = [] if facts.get("ratio", -1.0) >= self.least_ratio else ["ratio"]
        return found + [name for name, limit in self.most.items() if not facts[name] <= limit]

    def holds(self, measured: Measured) -> bool:
        return measured.ops_checked > 0 and not self.missed(measured.facts)

    @property
    def bar(self) -> str:
        limits = [f"{name} ≤ {limit:g}" for name, limit in self.most.items()]
        return "; ".join([f"ratio ≥ {self.least_ratio:g}"] * bool(self.least_ratio) + limits)


_FLOOD = {
    "slowest op later by, s": 0.2,
    "more descriptors": 20,
    "more memory, MiB": 10,
    **JOINS_S,
    **RESTS_S,
}
_DOOR = {"more descriptors": 66, "more memory, MiB": 16, **JOINS_S}  # of 90; 24 at rest
_ANYTHING = {"more descriptors": 64, "more memory, MiB": 64, **RESTS_S}

# fmt: off
ATTACKS = (
    Attack("mdns-53", "mDNS by a stranger: 53 packets (1,000 records) a second",
           "mdns", 60, 53, _FLOOD, 0.9),
    Attack("mdns-300", "300 machines a second announced and withdrawn",
           "mdns", 60, 600, _FLOOD, 0.9, "invented"),
    Attack("mdns-1000", "1,000 packets (19,000 records) a second", "mdns", 60, 1000, _FLOOD, 0.9),
    Attack("junk", "1,000 altered and broken mDNS packets a second",
           "mdns", 60, 1000, _FLOOD, 0.9, "junk"),
    Attack("names", "a member names 25,600 machines and leaves", "member", 20, 1280, RESTS_S, 0.8),
    Attack("announced", "a member announces and withdraws 100 machines a second by mDNS",
           "mdns", 20, 200, JOINS_S | RESTS_S, 0.8, "member"),
    Attack("door", "5,000 connections of strangers that are silent, slow or send garbage",
           "knock", 20, 250, _DOOR),
    Attack("local", "a trainer that sends garbage, 200 times a second; another user at the socket",
           "local", 10, 200, {"more memory, MiB": 16, **JOINS_S}),
    Attack("anything", "a member that sends anything at full pace, beside a job in which it has no "
           "rank", "anything", 60, 0, _ANYTHING, 0.8),
)


def run_attack(run: CampaignRun, attack: Attack) -> Tally:
    """So many turns (`--episodes`), each the control and then the attack; medians count."""
    order = attack.order(seconds=SHORT_S if run.short else None)
    pairs = run_turns(order, run.episodes, run.logs)
    return Tally(ops_checked=run.episodes, violations=pairs.faults, facts=pairs.facts)


CAMPAIGNS = tuple(
    Campaign(attack.name, attack.what, partial(run_attack, attack=attack), attack.bar,
             attack.holds, 3, 1, one_size=True)
    for attack in ATTACKS
)
# fmt: on
