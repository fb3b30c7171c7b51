"""The order of checks, and what they come to."""

from collections.abc import Iterator

import pytest

from pmesh.cli.doctor.rules.findings import (
    Finding,
    NamedCheck,
    Verdict,
    cause,
    cause_of,
    diagnose,
    exit_code,
    remark,
    well,
)


def fails() -> Iterator[Finding]:
    yield well("so far")
    raise PermissionError(13, "Permission denied")


def test_checks_end_at_the_first_cause_and_the_others_are_named() -> None:
    made: list[str] = []

    def check(name: str, *findings: Finding) -> NamedCheck:
        def run() -> Iterator[Finding]:
            made.append(name)
            yield from findings

        return NamedCheck(name, run)

    checks = (
        check("first", well("1"), remark("2")),
        check("second"),
        check("third", cause("3"), remark("4")),
        check("fourth", cause("5")),
    )
    found = [(each.check, each.verdict, each.found) for each in diagnose(checks)]
    assert found == [
        ("first", "well", "1"),
        ("first", "remark", "2"),
        ("third", "cause", "3"),
        ("third", "remark", "4"),
        ("fourth", "not tried", ""),
    ]
    assert made == ["first", "second", "third"]


def test_a_check_that_cannot_look_says_so_and_the_next_one_is_made() -> None:
    def names_nothing() -> Iterator[Finding]:
        raise OSError("the agent does not answer")
        yield

    checks = (
        NamedCheck("a", fails),
        NamedCheck("b", names_nothing),
        NamedCheck("c", lambda: [well("3")]),
    )
    assert [(each.check, each.verdict, each.found) for each in diagnose(checks)] == [
        ("a", "well", "so far"),
        ("a", "failed", "can't look: Permission denied"),
        ("b", "failed", "can't look: the agent does not answer"),
        ("c", "well", "3"),
    ]


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ((), 0),
        (("well", "remark", "not looked at"), 0),
        (("well", "failed"), 2),
        (("failed", "cause", "not tried"), 1),
    ],
)
def test_the_exit_code_is_that_of_the_worst(verdicts: tuple[Verdict, ...], code: int) -> None:
    assert exit_code(Finding(verdict=verdict, found="") for verdict in verdicts) == code


def test_an_error_s_last_clause_is_what_to_do() -> None:
    assert cause_of("a; b; run: c", means="so").todo == "run: c"
    assert cause_of("a; b; run: c").found == "a; b"
    assert (cause_of("only this").found, cause_of("only this").todo) == ("only this", "")
