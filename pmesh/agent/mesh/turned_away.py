"""Connections and announcements that were turned away; many are logged once a minute."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

import msgspec
import structlog
import trio

from pmesh.agent.events import EventLog
from pmesh.agent.schema import TurnedAwayStatus

_log = structlog.get_logger()

INTERVAL_S: Final = 60.0
FEW: Final = 8  # a neighbour's port scan, or a machine with another mesh key, is no attack
MAX_HOSTS_NAMED: Final = 3


def describe(
    before: TurnedAwayStatus,
    after: TurnedAwayStatus,
    hosts: Mapping[str, int],
    *,
    interval_s: float,
) -> str | None:
    """Return one line about the refusals of an interval; None if there were few.

    Args:
        before: The counts at its start.
        after: The counts at its end.
        hosts: How many connections each address made.
        interval_s: Its length.
    """
    were, are = msgspec.structs.asdict(before), msgspec.structs.asdict(after)
    new: dict[str, int] = {name: count - were[name] for name, count in are.items()}
    if sum(new.values()) < FEW and not new["broken_links"]:
        return None
    most = Counter(hosts).most_common(MAX_HOSTS_NAMED)
    where = f" ({', '.join(f'{count} from {host}' for host, count in most)})" if most else ""
    words = {
        "connections": (f"connection of a stranger{where}", f"connections of strangers{where}"),
        "forged_announcements": ("forged announcement", "forged announcements"),
        "foreign_announcements": ("announcement of another mesh", "announcements of other meshes"),
        "broken_links": (
            "link of a member that broke the protocol",
            "links of members that broke the protocol",
        ),
        "programs": ("local program", "local programs"),
    }
    parts = [
        f"{new[name]} {one if new[name] == 1 else many}"
        for name, (one, many) in words.items()
        if new[name]
    ]
    return f"turned away in the last {interval_s:.0f} s: {', '.join(parts)}"


async def watch(
    count: Callable[[], TurnedAwayStatus],
    take_hosts: Callable[[], Mapping[str, int]],
    news: EventLog,
) -> NoReturn:
    """Log and note refusals once a minute, for as long as the agent lives."""
    before = count()
    while True:
        await trio.sleep(INTERVAL_S)
        after = count()
        text = describe(before, after, take_hosts(), interval_s=INTERVAL_S)
        before = after
        if text is not None:
            _log.warning(text)
            news.note("turned away", text)
