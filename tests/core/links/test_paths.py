"""Which path is used, which has failed, and which others to dial."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.links.addresses import InterfaceKind, LocalAddress
from pmesh.core.links.health import WIFI, WIRED, begin
from pmesh.core.links.paths import (
    ASK_AFTER_S,
    IDLE_ASK_AFTER_S,
    LONGEST_REDIAL_S,
    LONGEST_STEADY_S,
    MAX_PATHS,
    REDIAL_S,
    RELAYED,
    STEADY_S,
    Attempts,
    PathFlaps,
    PathKey,
    PathState,
    carriers,
    choose,
    compared,
    failed,
    kind_rank,
    lost,
    lost_after,
    spread,
    to_ask,
    tried_again,
    ways_to,
)
from pmesh.core.wire.link import Address, PeerInterface

NOW = 1000.0


def path(
    interface: str,
    kind: str = "wired",
    *,
    speed: int = 1000,
    since: float = 0.0,
    flaps: int = 0,
    asked_at: float | None = None,
    last_heard: float = NOW,
    round_trip_s: float = 0.0003,
) -> PathState:
    health = begin(WIFI if kind == "wifi" else WIRED, now=since)
    health = msgspec.structs.replace(
        health, round_trip_s=round_trip_s, least_round_trip_s=round_trip_s
    )
    return PathState(
        key=PathKey(interface, "en0"),
        kind=kind,
        speed_mbit_s=speed,
        since=since,
        flaps=flaps,
        health=health,
        last_heard=last_heard,
        asked_at=asked_at,
    )


CABLE, WLAN = path("eth0"), path("wlan0", "wifi", round_trip_s=0.004)
BOLT = path("bolt0", "thunderbolt", speed=20_000)


def test_the_best_kind_is_chosen_first_then_the_fastest() -> None:
    fast = path("eth1", speed=10_000)
    unknown, later = path("eth2", speed=0), path("x", "a kind of a later version")
    assert choose([], None, now=NOW) is None
    for first, *rest in ([BOLT, CABLE], [CABLE, WLAN], [fast, CABLE], [CABLE, unknown]):
        assert choose([*rest, first], None, now=NOW) == first.key
    assert carriers([later, WLAN, CABLE, BOLT], None, now=NOW) == (
        BOLT.key,
        CABLE.key,
        WLAN.key,
        later.key,
    )
    kinds = [RELAYED, "a later one", "vpn", "wifi", "", "wired"]
    assert sorted(kinds, key=kind_rank) == ["wired", "", "wifi", "vpn", "a later one", RELAYED]


def test_a_better_path_replaces_another_once_it_has_been_steady() -> None:
    young = replace(BOLT, since=NOW - STEADY_S / 2)
    assert choose([CABLE, young], CABLE.key, now=NOW) == CABLE.key
    assert choose([CABLE, young], CABLE.key, now=NOW + STEADY_S) == BOLT.key
    assert carriers([CABLE, young], CABLE.key, now=NOW) == (CABLE.key,)
    doubtful = replace(BOLT, asked_at=NOW)
    assert choose([CABLE, doubtful], CABLE.key, now=NOW) == CABLE.key


def test_a_path_that_was_used_and_lost_again_and_again_must_be_steady_for_longer_each_time() -> (
    None
):
    waits = [replace(BOLT, since=0.0, flaps=flaps).steady_at for flaps in range(9)]
    assert waits == [1, 1, 2, 4, 8, 16, 32, LONGEST_STEADY_S, LONGEST_STEADY_S]


def carrying(path: PathState, mbit_s: int) -> PathState:
    return replace(path, measured_mbit_s=mbit_s)


def chosen_of(one: PathState, other: PathState, current: PathKey | None) -> PathKey | None:
    return choose(compared([one, other], current), current, now=NOW)


def test_a_cable_that_carries_far_less_than_it_claims_is_left_for_what_carries_much_more() -> None:
    cable, wlan = CABLE.key, WLAN.key
    assert chosen_of(carrying(CABLE, 94), carrying(WLAN, 300), cable) == wlan
    assert chosen_of(carrying(CABLE, 94), carrying(WLAN, 300), None) == wlan
    assert carriers(compared([carrying(CABLE, 94), carrying(WLAN, 300)], wlan), wlan, now=NOW) == (
        wlan,
        cable,
    )
    for carried, other, why in (
        (300, 900, "less than four times below what it claims is no contradiction"),
        (94, 0, "the other was not measured"),
        (94, 150, "it is not worth a switch"),
        (0, 300, "the cable was not measured"),
    ):
        assert chosen_of(carrying(CABLE, carried), carrying(WLAN, other), cable) == cable, why
    unknown = replace(CABLE, speed_mbit_s=0)
    assert chosen_of(carrying(unknown, 94), carrying(WLAN, 300), cable) == cable


@given(st.integers(10, 250), st.integers(10, 900), st.floats(1 / 1.3, 1.3), st.floats(1 / 1.3, 1.3))
def test_what_was_chosen_by_measurements_is_not_left_again_for_noise(
    cable: int, wlan: int, noise: float, other_noise: float
) -> None:
    chosen = chosen_of(carrying(CABLE, cable), carrying(WLAN, wlan), CABLE.key)
    if chosen == WLAN.key:
        measured = round(cable * min(noise, 1.0)), round(wlan * other_noise)
        now = chosen_of(carrying(CABLE, measured[0]), carrying(WLAN, measured[1]), WLAN.key)
        assert now == WLAN.key


class Plugged:
    """A cable that is plugged in again and again."""

    def __init__(self) -> None:
        self.flaps = PathFlaps()
        self.now = NOW

    def plug(self, *, for_s: float) -> float:
        """Plug it in for so long, and out for 1 s; return for how long it was used."""
        path = replace(BOLT, since=self.now, flaps=self.flaps.left(self.now))
        self.now += for_s
        self.flaps = lost(path, self.flaps, now=self.now)
        used_s = max(0.0, self.now - path.steady_at)
        self.now += 1.0
        return used_s


def test_the_fourth_time_within_a_minute_a_cable_is_used_within_five_seconds() -> None:
    cable = Plugged()
    assert [cable.plug(for_s=18) for _ in range(4)] == [17, 17, 16, 14]
    cable.now += LONGEST_STEADY_S  # it lies in a drawer
    assert cable.plug(for_s=9) == 5


def test_a_cable_that_does_not_stay_until_it_is_used_is_used_at_once_when_it_stays() -> None:
    cable = Plugged()
    assert [cable.plug(for_s=0.9) for _ in range(60)] == [0] * 60
    assert cable.plug(for_s=10) == 9


@given(st.floats(0.5, 30))
def test_a_cable_that_flaps_for_an_hour_is_lost_in_use_less_than_twice_a_minute(
    for_s: float,
) -> None:
    cable = Plugged()
    losses = 0
    while cable.now < NOW + 3600:
        losses += cable.plug(for_s=for_s) > 0
    assert losses <= 60 + 6


def to(remote: str, state: PathState) -> PathState:
    return replace(state, key=PathKey(state.key.interface, remote))


GIGABIT, SECOND = to("en0", path("eth0")), to("en1", path("eth1"))


@pytest.mark.parametrize(
    ("other", "brings"),
    [
        pytest.param(SECOND, True, id="as fast"),
        pytest.param(replace(SECOND, speed_mbit_s=50), True, id="a twentieth"),
        pytest.param(replace(SECOND, speed_mbit_s=49), False, id="less"),
        pytest.param(replace(SECOND, speed_mbit_s=0), False, id="of unknown speed"),
        pytest.param(to("en0", SECOND), False, id="to the same interface there"),
        pytest.param(to("en1", GIGABIT), False, id="from the same interface here"),
        pytest.param(replace(SECOND, since=NOW - STEADY_S / 2), False, id="young"),
        pytest.param(replace(SECOND, asked_at=NOW - 0.1), True, id="asked"),
        pytest.param(replace(SECOND, asked_at=NOW - 0.6), False, id="silent"),
    ],
)
def test_a_lane_goes_over_the_paths_that_bring_more(other: PathState, *, brings: bool) -> None:
    both = (GIGABIT.key, other.key)
    assert spread([other, GIGABIT], GIGABIT.key, now=NOW) == both[: 1 + brings]


def test_a_lane_goes_over_one_path_if_the_speed_of_the_best_is_unknown() -> None:
    unknown = replace(SECOND, kind="thunderbolt", speed_mbit_s=0)
    assert spread([GIGABIT, unknown], GIGABIT.key, now=NOW) == (unknown.key,)
    assert spread([], None, now=NOW) == ()
    young = replace(GIGABIT, since=NOW)
    assert spread([young], young.key, now=NOW) == (young.key,)


def test_four_paths_between_two_interfaces_each_are_two() -> None:
    crossed = [to("en1", GIGABIT), to("en0", SECOND)]
    keys = (GIGABIT.key, SECOND.key)
    assert spread([*crossed, SECOND, GIGABIT], None, now=NOW) == keys


@given(st.floats(0.0001, 1), st.floats(0.0001, 1))
def test_of_two_paths_of_one_rank_noise_moves_nothing(one_s: float, other_s: float) -> None:
    one, other = path("a", round_trip_s=one_s), path("b", round_trip_s=other_s)
    chosen = choose([one, other], one.key, now=NOW)
    assert chosen == choose([one, other], chosen, now=NOW)  # and it does not come back
    if other_s > one_s / 3:
        assert chosen == one.key


def test_a_path_in_use_is_asked_soon_and_another_only_now_and_then() -> None:
    for in_use, after_s in ((True, ASK_AFTER_S), (False, IDLE_ASK_AFTER_S)):
        heard = replace(CABLE, last_heard=NOW - after_s)
        assert to_ask(heard, in_use=in_use, doubted=False, now=NOW + 0.01)
        assert not to_ask(heard, in_use=in_use, doubted=False, now=NOW - 0.01)
        assert to_ask(heard, in_use=in_use, doubted=True, now=NOW - 0.01)
        asked = replace(heard, asked_at=NOW)
        assert not to_ask(asked, in_use=in_use, doubted=True, now=NOW + 1)


def test_a_path_fails_if_it_is_silent_while_another_answers() -> None:
    silent = replace(CABLE, asked_at=NOW - 0.6, last_heard=NOW - 0.8)
    answered, before = replace(WLAN, last_heard=NOW - 0.5), replace(WLAN, last_heard=NOW - 0.7)
    assert list(failed([silent, answered], now=NOW)) == [CABLE.key]
    assert list(failed([silent, before], now=NOW)) == []  # the machine itself may be silent
    assert list(failed([silent], now=NOW)) == []
    assert list(failed([replace(silent, asked_at=NOW - 0.4), answered], now=NOW)) == []
    wlan = replace(WLAN, asked_at=NOW - 0.9, last_heard=NOW - 2)
    assert list(failed([wlan, CABLE], now=NOW)) == []  # Wi-Fi rests for so long
    assert list(failed([replace(wlan, asked_at=NOW - 1.1), CABLE], now=NOW)) == [WLAN.key]


# --- ways


def own(interface: str, host: str, kind: InterfaceKind = "wired", bits: int = 24) -> LocalAddress:
    return LocalAddress(interface=interface, host=host, prefix_bits=bits, kind=kind)


def theirs(name: str, *hosts: str) -> PeerInterface:
    return PeerInterface(name, "wired", 1000, hosts)


def test_each_pair_of_interfaces_that_reach_one_another_is_one_way() -> None:
    local = (
        own("en0", "10.0.0.1"),
        own("en0", "fd00::1", bits=64),
        own("en1", "10.0.1.1"),
        own("bridge0", "fe80::1", bits=64),
    )
    peer = [
        theirs("eth0", "10.0.0.2", "fd00::2"),
        theirs("eth1", "10.0.2.2"),
        theirs("tb", "fe80::2"),
    ]
    ways = ways_to(peer, port=24160, local=local)
    assert [(way.key, way.address) for way in ways] == [
        (("en0", "eth0"), Address("10.0.0.2", 24160)),
        (("bridge0", "tb"), Address("fe80::2%bridge0", 24160)),
    ]
    assert ways[0].own == local[0]


@pytest.mark.parametrize("host", ["", "mac.local", "x" * 255, "10.0.0.256", "fe80::1%en0"])
def test_no_way_leads_to_what_a_peer_calls_an_address_and_is_none(host: str) -> None:
    assert ways_to([theirs("en0", host)], port=1, local=[own("eth0", "10.0.0.1")]) == ()


def test_there_are_only_so_many_ways_and_none_over_loopback() -> None:
    local = [own(f"en{n}", f"10.0.0.{n}") for n in range(1, 5)]
    peer = [theirs(f"eth{n}", f"10.0.0.{n + 100}") for n in range(5)]
    assert len(ways_to(peer, port=1, local=local)) == MAX_PATHS
    lo = own("lo", "127.0.0.1", "loopback", 8)
    assert ways_to([theirs("lo", "127.0.0.1")], port=1, local=[lo]) == ()


@pytest.mark.parametrize(("times", "pause_s"), [(1, REDIAL_S), (3, 4.0), (40, LONGEST_REDIAL_S)])
def test_a_way_that_fails_is_tried_again_after_a_growing_pause(times: int, pause_s: float) -> None:
    attempts = Attempts()
    for _ in range(times):
        attempts = tried_again(attempts, now=NOW)
    assert attempts == Attempts(count=times, due=NOW + pause_s)


@pytest.mark.parametrize(("times", "pause_s"), [(0, 0.5), (1, REDIAL_S), (3, 4.0), (40, 60.0)])
def test_a_path_that_outlasts_the_pause_before_it_counts_as_a_new_one(
    times: int, pause_s: float
) -> None:
    tried = Attempts(count=times, due=NOW)
    assert lost_after(tried, lasted_s=pause_s) == Attempts()
    assert lost_after(tried, lasted_s=pause_s - 0.01) == tried
