"""What a user is told of paths: which one is slower than it should be, and why one is used."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from pmesh.core.links.paths import PathState, kind_rank
from pmesh.core.wire.link import PeerInterface

USUAL_MBIT_S: Final[Mapping[str, int]] = MappingProxyType({"thunderbolt": 20_000, "wired": 1_000})
"""What nearly every port and cable of a kind can do; of the others too many things decide."""


def why_slow(
    path: PathState,
    *,
    in_use: bool,
    ours: Sequence[PeerInterface],
    theirs: Sequence[PeerInterface],
    able_mbit_s: int = 0,
) -> str | None:
    """Return why a path is slower than it should be, and what to do; None if it is not.

    Args:
        path: One between two machines.
        in_use: Messages go over it.
        ours: The interfaces of this machine.
        theirs: The interfaces of the other one.
        able_mbit_s: What both ends of the cable at our interface can do; 0 if it is not known.
    """
    if in_use and path.kind == "wifi":
        here, there = _cables(ours), _cables(theirs)
        if here and there:
            return (
                f"Wi-Fi is used, though both machines have a cable ({here[0].name} here, "
                f"{there[0].name} there): 'pmesh ping NAME' says why"
            )
    for ends, name, where, able in (
        (ours, path.key.interface, "here", able_mbit_s),
        (theirs, path.key.remote, "there", 0),
    ):
        end = next((end for end in ends if end.name == name), None)
        should = able or (0 if end is None else USUAL_MBIT_S.get(end.kind, 0))
        if end is not None and 0 < end.speed_mbit_s < should:
            who = "both of its ends" if able else "nearly every port"
            return (
                f"{name} {where} runs at {end.speed_mbit_s} Mbit/s, though {who} can do {should}: "
                "try another cable or port"
            )
    if path.is_slow:
        return (
            f"{path.key.interface} carries {path.measured_mbit_s} Mbit/s, though both ends claim "
            f"{path.speed_mbit_s}: a switch or cable between is slow, or a machine is busy"
        )
    return None


def _cables(interfaces: Iterable[PeerInterface]) -> list[PeerInterface]:
    return [interface for interface in interfaces if interface.kind in USUAL_MBIT_S]


def why_used(used: PathState, others: Sequence[PathState]) -> str:
    """Return why a path is used and not one of the others, as the end of a sentence."""
    if not others:
        return "no other way answers"
    best = min(others, key=lambda path: (path.rank, path.key))
    if best.is_better_than(used):
        return _why_not_yet(best)
    name = best.key.interface
    if best.is_outdone and not used.is_outdone:
        return f"{name} carries only {best.measured_mbit_s} of {best.speed_mbit_s} Mbit/s"
    if kind_rank(used.kind) < kind_rank(best.kind):
        return f"{used.kind} is better than {best.kind}"
    if used.rank < best.rank:
        return f"it is faster than {name}"
    return f"it was there first, and {name} is not much better"


def _why_not_yet(better: PathState) -> str:
    name = better.key.interface
    if better.asked_at is not None:
        return f"{name} would be better, but owes an answer"
    lost = f" and was lost {better.flaps} times lately" if better.flaps else ""
    return f"{name} would be better, but is new{lost}: it is used once it has lasted"
