"""`pmesh ping`: tries every way to another machine, and says which one is used."""

from pathlib import Path

import msgspec

from pmesh.cli.status_all import path_text
from pmesh.client.control import ping
from pmesh.core.wire.control import WayTried
from pmesh.home_paths import home_directory
from pmesh.terminal.lines import say, say_json


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """The path over which messages go now."""

    interface: str
    remote: str
    why: str


class PingReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `pmesh ping --json` prints."""

    schema: int = 1
    name: str
    ways: tuple[WayTried, ...]
    used: Used | None


def show_ping(home: Path | None, name: str, *, as_json: bool) -> int:
    """Print each way as it answers; return 0 if any has, else 1."""
    ways: list[WayTried] = []
    used: Used | None = None
    for reply in ping(home_directory(home), name):
        if isinstance(reply, WayTried):
            ways.append(reply)
            if not as_json:
                say(_line(reply))
        elif reply.remote:
            used = Used(interface=reply.interface, remote=reply.remote, why=reply.why)
    if as_json:
        report = PingReport(name=name, ways=tuple(ways), used=used)
        say_json(msgspec.json.encode(report))
    elif used is None:
        say(f"no way to {name} is used")
    else:
        say(f"{path_text(used.interface, used.remote)} is used: {used.why}")
    return 0 if any(way.rtt_ms is not None for way in ways) else 1


def _line(way: WayTried) -> str:
    path = path_text(way.interface, way.remote) if way.remote else way.interface
    speeds = (way.mbit_s, "measured"), (way.speed_mbit_s, "nominal")
    speed = ", ".join(f"{mbit_s} Mbit/s {what}" for mbit_s, what in speeds if mbit_s)
    found = way.why_not if way.rtt_ms is None else f"{way.rtt_ms:.2f} ms"
    if way.rtt_ms is None:
        return f"{path:<20}  {way.address:<20}  {way.kind:<11}  {found}"
    return f"{path:<20}  {way.address:<20}  {way.kind:<11}  {found:>9}  {speed}".rstrip()
