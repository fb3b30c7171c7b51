"""Reads `nft -j list ruleset`: which chains drop what an agent needs (libnftables-json(5)).

A rule that is narrower than "this port" is taken for one that drops the port; matches that are no
ports or groups are not understood. What iptables has made is hidden in `xt`, and matches nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import msgspec

MDNS_PORT: Final = 5353
MDNS_GROUP: Final = "224.0.0.251"

_DROPS: Final = frozenset({"drop", "reject"})
_VERDICTS: Final = _DROPS | {"accept"}
_NO_CONDITIONS: Final = _VERDICTS | {"counter", "log", "comment"}


class _Entry(msgspec.Struct):
    """A chain, or a rule."""

    family: str
    table: str
    name: str = ""
    """Of a chain."""
    chain: str = ""
    """Of a rule."""
    hook: str = ""
    policy: str = ""
    expr: list[dict[str, Any]] = []

    @property
    def place(self) -> str:
        return f"{self.family} {self.table} {self.chain or self.name}"

    @property
    def verdict(self) -> str:
        return next((key for part in self.expr for key in part if key in _VERDICTS), "")

    @property
    def is_for_all(self) -> bool:
        """True if the rule has no condition."""
        return all(part.keys() <= _NO_CONDITIONS for part in self.expr)

    def is_for(self, port: int) -> bool:
        """True if the rule names the port to which packets go."""
        return any(_has(right, port) for field, right in self._matches() if field == "dport")

    @property
    def is_for_mdns(self) -> bool:
        return self.is_for(MDNS_PORT) or any(_has(r, MDNS_GROUP) for _, r in self._matches())

    def _matches(self) -> Iterator[tuple[str, object]]:
        for part in self.expr:
            match part:
                case {"match": {"op": "==", "left": {"payload": {"field": field}}, "right": right}}:
                    yield str(field), right
                case _:
                    pass


class _Item(msgspec.Struct):
    chain: _Entry | None = None
    rule: _Entry | None = None


class _Ruleset(msgspec.Struct):
    nftables: list[_Item] = []


def read_nftables(text: str, port: int) -> Iterator[str]:
    """Yield a clause for each chain that drops what the agent at this port needs."""
    try:
        items = msgspec.json.decode(text, type=_Ruleset).nftables
    except msgspec.MsgspecError:
        return  # of another version
    rules = [item.rule for item in items if item.rule is not None]
    accepts = any(rule.verdict == "accept" and rule.is_for(port) for rule in rules)
    for chain in (item.chain for item in items if item.chain is not None):
        own = [rule for rule in rules if rule.place == chain.place]
        if chain.hook in {"input", "output", "prerouting"}:
            yield from _drops_of(chain, own, port, accepts=accepts)


def _drops_of(chain: _Entry, rules: list[_Entry], port: int, *, accepts: bool) -> Iterator[str]:
    dropping = [rule for rule in rules if rule.verdict in _DROPS]
    if any(rule.is_for(port) for rule in dropping):
        whose = "to the agents of others" if chain.hook == "output" else "to the agent"
        yield f"nftables drops connections {whose}, port {port} (chain {chain.place})"
    if any(rule.is_for_mdns for rule in dropping):
        yield f"nftables drops mDNS, UDP port {MDNS_PORT} (chain {chain.place})"
    for_all = chain.policy == "drop" or any(rule.is_for_all for rule in dropping)
    if chain.hook == "input" and for_all and not accepts:
        yield f"nftables drops what no rule accepts, such as port {port} (chain {chain.place})"


def _has(right: object, wanted: int | str) -> bool:
    """Return True if the right side of a match is this value, a range, or a set of such."""
    match right:
        case {"set": list()}:
            members = cast("Mapping[str, list[object]]", right)["set"]
            return any(_has(member, wanted) for member in members)
        case {"range": [int(first), int(last)]}:
            return isinstance(wanted, int) and first <= wanted <= last
        case _:
            return right == wanted
