"""How many guesses an agent's codes allow, whatever its user and strangers do."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.errors import UsageError
from pmesh.invites.rules.codes import Code
from pmesh.invites.rules.invitations import (
    HOUR_S,
    LASTS_S,
    MOST_CODES,
    TRANSITIONS,
    Invitations,
)

CODE = Code(7, "guitar", "lemon")


def opened(*, now: float = 0) -> Invitations:
    invitations = Invitations()
    assert invitations.open(lambda: CODE, now=now) == CODE
    return invitations


def test_an_open_code_is_taken_once() -> None:
    invitations = opened()
    assert invitations.take(7, now=1) == CODE
    assert invitations.take(7, now=1) is None
    invitations.finish(let_in=False)
    assert invitations.take(7, now=1) is None


def test_another_number_costs_no_guess() -> None:
    invitations = opened()
    assert invitations.take(8, now=1) is None
    assert invitations.take(7, now=1) == CODE


def test_a_code_is_good_until_ten_minutes_have_passed() -> None:
    assert opened().take(7, now=LASTS_S - 0.1) == CODE
    assert opened().take(7, now=LASTS_S) is None


def test_a_withdrawn_code_is_good_for_nothing() -> None:
    invitations = opened()
    invitations.withdraw()
    assert invitations.take(7, now=1) is None


def test_a_second_code_is_refused_while_one_is_open_or_taken() -> None:
    invitations = opened()
    with pytest.raises(UsageError, match="invites already"):
        invitations.open(lambda: CODE, now=1)
    invitations.take(7, now=1)
    invitations.withdraw()  # the user's Ctrl-C does not end the exchange: its driver does
    with pytest.raises(UsageError, match="invites already"):
        invitations.open(lambda: CODE, now=1)
    invitations.finish(let_in=False)
    assert invitations.open(lambda: CODE, now=1) == CODE


def test_a_fourth_code_in_an_hour_is_refused_with_how_long_to_wait() -> None:
    invitations = Invitations()
    for now in (0.0, 100.0, 200.0):
        invitations.open(lambda: CODE, now=now)
        invitations.withdraw()
    with pytest.raises(UsageError, match="wait 55 minutes, invite from another machine"):
        invitations.open(lambda: CODE, now=300)
    with pytest.raises(UsageError, match="wait 1 minutes"):
        invitations.open(lambda: CODE, now=HOUR_S - 0.1)
    assert invitations.open(lambda: CODE, now=HOUR_S) == CODE


def test_a_code_that_let_a_machine_in_does_not_count() -> None:
    invitations = Invitations()
    for now in range(8):
        invitations.open(lambda: CODE, now=now)
        invitations.take(7, now=now)
        invitations.finish(let_in=True)
    assert invitations.state == "none"


def test_an_end_without_an_exchange_changes_nothing() -> None:
    invitations = opened()
    invitations.finish(let_in=True)
    assert invitations.take(7, now=1) == CODE


@dataclass
class GuessedInvitations:
    """An agent's codes, and all guesses that they have allowed."""

    now: float = 0
    drawn: int = 0
    invitations: Invitations = field(default_factory=Invitations)
    opened_at: dict[Code, float] = field(default_factory=dict)
    taken: list[tuple[float, Code]] = field(default_factory=list)
    wrong: list[float] = field(default_factory=list)

    def draw(self) -> Code:
        self.drawn += 1
        return Code(1 + self.drawn % 3, f"word{self.drawn}", "lemon")

    def do(self, deed: str, number: int, passed_s: float) -> None:
        self.now += passed_s
        if deed == "open":
            try:
                code = self.invitations.open(self.draw, now=self.now)
            except UsageError:
                return
            self.opened_at[code] = self.now
        elif deed == "take":
            taken = self.invitations.take(number, now=self.now)
            if taken is not None:
                assert taken.number == number
                self.taken.append((self.now, taken))
        elif deed == "withdraw":
            self.invitations.withdraw()
        elif self.invitations.state == "taken":
            let_in = deed == "let in"
            self.invitations.finish(let_in=let_in)
            if not let_in:
                self.wrong.append(self.taken[-1][0])


DEEDS = st.sampled_from(["open", "open", "take", "take", "withdraw", "let in", "turn away"])
TIMES = st.one_of(st.just(0.0), st.floats(0, LASTS_S * 1.1), st.floats(0, HOUR_S))


@given(st.lists(st.tuples(DEEDS, st.integers(1, 3), TIMES), max_size=60))
def test_whatever_happens_a_code_allows_one_guess_and_an_hour_three_wrong_ones(
    deeds: list[tuple[str, int, float]],
) -> None:
    watched = GuessedInvitations()
    for deed, number, passed_s in deeds:
        watched.do(deed, number, passed_s)

    codes = [code for _, code in watched.taken]
    assert len(codes) == len(set(codes))
    for at, code in watched.taken:
        assert at - watched.opened_at[code] < LASTS_S
    began = sorted(watched.opened_at[code] for at, code in watched.taken if at in watched.wrong)
    for first, fourth in zip(began, began[MOST_CODES:], strict=False):
        assert fourth - first >= HOUR_S


def test_the_table_has_a_way_out_of_each_state() -> None:
    states = {state for state, _ in TRANSITIONS} | set(TRANSITIONS.values())
    assert {state for state, _ in TRANSITIONS} == states
