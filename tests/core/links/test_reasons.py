"""What a user is told of paths."""

from dataclasses import replace

import msgspec
import pytest

from pmesh.core.links.health import WIFI, WIRED, begin
from pmesh.core.links.paths import PathKey, PathState
from pmesh.core.links.reasons import why_slow, why_used
from pmesh.core.wire.link import PeerInterface


def end(name: str, kind: str = "wired", speed: int = 1000) -> PeerInterface:
    return PeerInterface(name, kind, speed, ())


def path(
    interface: str, kind: str = "wired", speed: int = 1000, *, trip_s: float = 3e-4
) -> PathState:
    health = begin(WIFI if kind == "wifi" else WIRED, now=0.0)
    return PathState(
        key=PathKey(interface, "en0"),
        kind=kind,
        speed_mbit_s=speed,
        since=0.0,
        health=msgspec.structs.replace(health, least_round_trip_s=trip_s),
        last_heard=0.0,
    )


def slow(
    one: PathState,
    ours: PeerInterface,
    theirs: PeerInterface,
    *,
    in_use: bool = True,
    able: int = 0,
) -> str | None:
    return why_slow(one, in_use=in_use, ours=[ours], theirs=[theirs], able_mbit_s=able)


@pytest.mark.parametrize(
    ("kind", "speed"), [("wired", 1000), ("wired", 0), ("thunderbolt", 40_000), ("wifi", 6)]
)
def test_a_path_as_fast_as_its_kind_or_of_unknown_speed_is_not_marked(
    kind: str, speed: int
) -> None:
    assert slow(path("en5", kind, speed), end("en5", kind, speed), end("en0", kind, speed)) is None


def test_a_cable_slower_than_ports_are_is_marked_at_the_end_that_is_slow() -> None:
    text = slow(path("en5", speed=100), end("en5", speed=100), end("en0"))
    assert text == (
        "en5 here runs at 100 Mbit/s, though nearly every port can do 1000: "
        "try another cable or port"
    )
    assert "en0 there runs at 100" in (
        slow(path("en5", speed=100), end("en5"), end("en0", speed=100)) or ""
    )
    assert "can do 20000" in (
        slow(path("b0", "thunderbolt"), end("b0", "thunderbolt", 10_000), end("en0")) or ""
    )


def test_what_both_ends_of_a_cable_have_said_counts_more_than_what_is_usual() -> None:
    tenth, tenfold = path("en5", speed=100), path("en5", speed=1000)
    assert slow(tenth, end("en5", speed=100), end("en0"), able=100) is None, "an old switch"
    text = slow(tenfold, end("en5"), end("en0"), able=10_000)
    assert text is not None
    assert "runs at 1000 Mbit/s, though both of its ends can do 10000" in text


def test_a_path_that_was_measured_to_carry_far_less_than_it_claims_is_marked() -> None:
    text = slow(replace(path("en5"), measured_mbit_s=94), end("en5"), end("en0"))
    assert text == (
        "en5 carries 94 Mbit/s, though both ends claim 1000: "
        "a switch or cable between is slow, or a machine is busy"
    )
    assert slow(replace(path("en5"), measured_mbit_s=300), end("en5"), end("en0")) is None


def test_wifi_beside_a_cable_is_marked_while_it_is_used() -> None:
    wlan = path("en1", "wifi", 0)
    here, there = (end("en1", "wifi", 0), end("en5")), (end("en0", "wifi", 0), end("en7"))
    text = why_slow(wlan, in_use=True, ours=here, theirs=there)
    assert text is not None
    assert "both machines have a cable (en5 here, en7 there)" in text
    assert why_slow(wlan, in_use=False, ours=here, theirs=there) is None
    assert why_slow(wlan, in_use=True, ours=here, theirs=there[:1]) is None


CABLE, WLAN = path("eth0"), path("wlan0", "wifi", 0)
OUTDONE = replace(CABLE, measured_mbit_s=94, is_outdone=True)


@pytest.mark.parametrize(
    ("used", "other", "why"),
    [
        (CABLE, WLAN, "wired is better than wifi"),
        (path("eth1", speed=10_000), CABLE, "it is faster than eth0"),
        (CABLE, path("eth1"), "it was there first, and eth1 is not much better"),
        (WLAN, OUTDONE, "eth0 carries only 94 of 1000 Mbit/s"),
        (WLAN, CABLE, "eth0 would be better, but is new: it is used once it has lasted"),
        (WLAN, replace(CABLE, flaps=3), "but is new and was lost 3 times lately"),
        (WLAN, replace(CABLE, asked_at=1.0), "eth0 would be better, but owes an answer"),
    ],
)
def test_the_path_that_is_used_is_explained(used: PathState, other: PathState, why: str) -> None:
    assert why in why_used(used, [other])


def test_an_only_path_needs_no_comparison() -> None:
    assert why_used(CABLE, []) == "no other way answers"
