import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pmesh.core.links.health import (
    TRANSITIONS,
    WIFI,
    WIRED,
    Condition,
    Health,
    HealthEvent,
    Thresholds,
    begin,
    forgive_stall,
    heard_from,
    measure_round_trip_s,
    pass_time,
)

HEALTHY, DEGRADED, SUSPECT, GONE = Condition
HEARD, LATE, SILENT, LOST = HealthEvent

START = 100.0
SILENCE_S = {LATE: 0.6, SILENT: 1.5, LOST: 2.5}


def health_in(condition: Condition) -> Health:
    return replace(begin(WIRED, now=START), condition=condition)


EXPECTED = [
    (HEALTHY, HEARD, HEALTHY),
    (HEALTHY, LATE, DEGRADED),
    (HEALTHY, SILENT, SUSPECT),
    (HEALTHY, LOST, GONE),
    (DEGRADED, HEARD, HEALTHY),
    (DEGRADED, LATE, DEGRADED),
    (DEGRADED, SILENT, SUSPECT),
    (DEGRADED, LOST, GONE),
    (SUSPECT, HEARD, HEALTHY),
    (SUSPECT, LATE, SUSPECT),
    (SUSPECT, SILENT, SUSPECT),
    (SUSPECT, LOST, GONE),
    (GONE, HEARD, GONE),
    (GONE, LATE, GONE),
    (GONE, SILENT, GONE),
    (GONE, LOST, GONE),
]


@pytest.mark.parametrize(("before", "event", "after"), EXPECTED)
def test_each_signal_leads_where_the_table_says(
    before: Condition, event: HealthEvent, after: Condition
) -> None:
    health = health_in(before)
    if event is HEARD:
        step = heard_from(health, now=START + 0.1)
    else:
        step = pass_time(health, now=START + SILENCE_S[event])
    assert step.health.condition is after
    assert step.changed_to is (None if before is after else after)


def test_the_table_is_complete() -> None:
    pairs = {(condition, event) for condition in TRANSITIONS for event in TRANSITIONS[condition]}
    assert pairs == {(before, event) for before, event, _ in EXPECTED}


def test_a_short_silence_changes_nothing() -> None:
    health = begin(WIRED, now=START)
    assert pass_time(health, now=START + 0.49).changed_to is None


@pytest.mark.parametrize("thresholds", [WIRED, WIFI])
def test_each_condition_begins_exactly_with_its_silence(thresholds: Thresholds) -> None:
    health = begin(thresholds, now=0.0)
    for silence_s, condition in (
        (thresholds.degraded_after_s, DEGRADED),
        (thresholds.suspect_after_s, SUSPECT),
        (thresholds.gone_after_s, GONE),
    ):
        assert pass_time(health, now=silence_s - 0.01).changed_to is None
        step = pass_time(health, now=silence_s)
        assert step.changed_to is condition
        health = step.health


def after_silences(*silences_s: float) -> tuple[Health, float]:
    """Return the health after silences that have ended by themselves, and the time."""
    health, now = begin(WIRED, now=0.0), 0.0
    for silence_s in silences_s:
        now += silence_s
        health = heard_from(pass_time(health, now=now).health, now=now).health
    return health, now


def gone_after_s(health: Health, now: float, *, vouched: bool = False, deaf: bool = False) -> float:
    """Return the shortest silence in tenths of a second that ends the link."""
    tenths = range(1, 1000)
    return next(
        n / 10
        for n in tenths
        if pass_time(health, now=now + n / 10, vouched=vouched, deaf=deaf).changed_to is GONE
    )


class TestUnusualSilence:
    """V12."""

    @pytest.mark.parametrize(
        ("silences_s", "patience_s"),
        [((), 2.0), ((0.2,) * 50, 2.0), ((0.9,), 2.0), ((1.5,), 3.0), ((1.9, 1.9, 1.0), 3.8)],
    )
    def test_is_longer_where_long_ones_have_ended_by_themselves(
        self, silences_s: tuple[float, ...], patience_s: float
    ) -> None:
        assert gone_after_s(*after_silences(*silences_s)) == pytest.approx(patience_s, abs=0.11)

    @pytest.mark.parametrize("reason", ["vouched", "deaf"])
    def test_says_nothing_of_the_link_if_it_is_explained(self, reason: str) -> None:
        health = pass_time(begin(WIRED, now=0.0), now=1.9, **{reason: True}).health
        health = heard_from(health, now=1.9).health
        assert health.longest_silence_s == 1.9
        assert gone_after_s(health, 1.9) == 2.0

    def test_is_forgotten_in_minutes(self) -> None:
        health, now = after_silences(1.9, *(0.2,) * 600)
        assert gone_after_s(health, now) == 2.0

    def test_of_our_own_making_counts_for_nothing(self) -> None:
        health = forgive_stall(begin(WIRED, now=0.0), stalled_s=1.8, now=1.9)
        health = heard_from(pass_time(health, now=1.9).health, now=1.9).health
        assert gone_after_s(health, 1.9) == 2.0

    def test_is_allowed_for_longer_while_another_member_hears_the_peer(self) -> None:
        assert gone_after_s(begin(WIRED, now=0.0), 0.0, vouched=True) == 10.0

    @pytest.mark.parametrize(("thresholds", "patience_s"), [(WIRED, 5.0), (WIFI, 10.0)])
    def test_is_allowed_for_longer_while_nobody_is_heard(
        self, thresholds: Thresholds, patience_s: float
    ) -> None:
        assert gone_after_s(begin(thresholds, now=0.0), 0.0, deaf=True) == patience_s

    def test_is_longer_where_a_redial_takes_long(self) -> None:
        far = heard_from(begin(WIRED, now=0.0), now=0.0, round_trip_s=0.6).health
        assert gone_after_s(far, 0.0) == 3.0
        held_up = heard_from(begin(WIRED, now=0.0), now=0.0, round_trip_s=0.001).health
        held_up = heard_from(held_up, now=0.0, round_trip_s=3.0).health  # until a cut was mended
        assert gone_after_s(held_up, 0.0) == 2.0

    def test_is_never_longer_than_ten_seconds(self) -> None:
        health, now = after_silences(1.9, 3.7, 7.3)
        for vouched in (False, True):
            assert gone_after_s(health, now, vouched=vouched, deaf=True) == 10.0


def test_the_timeout_of_a_link_is_its_round_trip_and_four_times_its_deviation() -> None:
    health = begin(WIRED, now=0.0)
    assert health.timeout_s == 0.0
    health = heard_from(health, now=0.1, round_trip_s=0.1).health
    assert health.timeout_s == pytest.approx(0.1)
    health = heard_from(health, now=0.1, round_trip_s=0.2).health
    assert health.timeout_s == pytest.approx(0.12 + 4 * 0.04)


def test_on_wires_a_peer_is_suspect_after_one_second_and_gone_after_two() -> None:
    assert (WIRED.suspect_after_s, WIRED.gone_after_s) == (1.0, 2.0)
    assert (WIFI.suspect_after_s, WIFI.gone_after_s) == (2.5, 5.0)


def test_an_older_reading_of_the_clock_does_not_unhear_a_peer() -> None:
    health = heard_from(begin(WIRED, now=START), now=START - 5).health
    assert health.last_heard == START


def test_a_stall_of_our_own_is_not_held_against_the_peer() -> None:
    health = begin(WIRED, now=START)
    woken = START + 60.1
    forgiven = forgive_stall(health, stalled_s=60.0, now=woken)
    assert pass_time(health, now=woken).changed_to is GONE
    assert pass_time(forgiven, now=woken).changed_to is None
    assert pass_time(forgiven, now=woken + 2.0).changed_to is GONE


def test_forgiving_more_than_has_passed_gives_no_credit() -> None:
    forgiven = forgive_stall(begin(WIRED, now=START), stalled_s=3600.0, now=START + 1)
    assert forgiven.last_heard == START + 1


def test_forgiving_proves_nothing_about_a_suspect() -> None:
    suspect = pass_time(begin(WIRED, now=START), now=START + 1.0).health
    forgiven = forgive_stall(suspect, stalled_s=0.9, now=START + 1.0)
    assert pass_time(forgiven, now=START + 1.0).health.condition is SUSPECT


def test_the_first_round_trip_is_taken_as_it_is() -> None:
    health = heard_from(begin(WIRED, now=0.0), now=0.1, round_trip_s=0.004).health
    assert (health.round_trip_s, health.round_trip_variance_s2) == (0.004, 0.0)


def test_a_message_without_an_echo_leaves_the_round_trip() -> None:
    health = heard_from(begin(WIRED, now=0.0), now=0.1, round_trip_s=0.004).health
    assert heard_from(health, now=0.2).health.round_trip_s == 0.004


@given(st.lists(st.floats(0.0001, 1.0), min_size=2, max_size=30))
def test_the_averages_equal_their_definition(samples: list[float]) -> None:
    health = begin(WIRED, now=0.0)
    for sample in samples:
        health = heard_from(health, now=0.1, round_trip_s=sample).health
    weights = [0.8 ** (len(samples) - 1)]
    weights += [0.2 * 0.8**age for age in reversed(range(len(samples) - 1))]
    mean = sum(w * s for w, s in zip(weights, samples, strict=True))
    variance = sum(w * (s - mean) ** 2 for w, s in zip(weights, samples, strict=True))
    assert health.round_trip_s == pytest.approx(mean)
    assert health.round_trip_variance_s2 == pytest.approx(variance, abs=1e-12)


@pytest.mark.parametrize(
    ("now_us", "echo_us", "held_us", "expected"),
    [
        (10_000, 5_000, 2_000, 0.003),
        (10_000, 5_000, 5_000, 0.0),
        (10_000, 0, 0, None),  # nothing has come back yet
        (10_000, 5_000, 6_000, None),  # held longer than it was away
        (10_000, 20_000, 0, None),  # an echo from the future
        (10_000, 5_000, -1, None),
        (10_000, -1, 0, None),
        (61_000_001, 1_000, 0, None),
        (10_000, 5_000, 2**400, None),
    ],
)
def test_an_impossible_echo_is_no_measurement(
    now_us: int, echo_us: int, held_us: int, expected: float | None
) -> None:
    assert measure_round_trip_s(now_us=now_us, echo_us=echo_us, held_us=held_us) == expected


def test_who_is_back_soon_was_given_up_too_early() -> None:
    gone = pass_time(begin(WIRED, now=START), now=START + 2.0).health
    assert gone.condition is GONE
    soon = begin(WIRED, now=START + 3.0, before=gone)
    assert (soon.condition, soon.gone_after_s) == (HEALTHY, 4.0)
    assert begin(WIRED, now=START + 5.0, before=gone).gone_after_s == 2.0
    vouched = replace(gone, explained=True)
    assert begin(WIRED, now=START + 3.0, before=vouched).gone_after_s == 2.0


def test_what_was_measured_outlives_the_link() -> None:
    silent = pass_time(begin(WIRED, now=START), now=START + 1.5).health
    heard = heard_from(silent, now=START + 1.5, round_trip_s=0.3).health
    again = begin(WIRED, now=START + 1.5, before=heard)
    assert (again.round_trip_s, again.gone_after_s) == (0.3, 3.0)
    assert begin(WIRED, now=START + 61.5, before=heard).gone_after_s == 2.0
