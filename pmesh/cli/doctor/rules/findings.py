"""What a check has found, and the order of checks, which ends at the first cause."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

Verdict: TypeAlias = Literal["well", "remark", "cause", "not looked at", "not tried", "failed"]

WELL: Final = 0
CAUSE_FOUND: Final = 1
COULD_NOT_LOOK: Final = 2


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `pmesh doctor`."""

    check: str = ""
    """The name of the check, which `diagnose` fills in."""
    verdict: Verdict
    found: str
    """What was looked at, and what was found there."""
    means: str = ""
    """What follows from that; empty if nothing does."""
    todo: str = ""
    """What to type or to do; empty if nothing is to be done."""


class NamedCheck(NamedTuple):
    """One check, by the name that its findings have."""

    name: str
    run: Callable[[], Iterable[Finding]]
    """Yields nothing if the check says nothing on this system. Raises OSError if it can't look."""


def well(found: str) -> Finding:
    return Finding(verdict="well", found=found)


def remark(found: str, *, means: str = "", todo: str = "") -> Finding:
    """Return what is slow or unwise, but stops nothing."""
    return Finding(verdict="remark", found=found, means=means, todo=todo)


def cause(found: str, *, means: str = "", todo: str = "") -> Finding:
    """Return what keeps machines apart."""
    return Finding(verdict="cause", found=found, means=means, todo=todo)


def not_looked_at(why: str) -> Finding:
    return Finding(verdict="not looked at", found=why)


def cause_of(error: str, *, means: str = "") -> Finding:
    """Return the finding for the text of an error, which ends with what to do.

    >>> cause_of("can't read k: it is a link; run: mv k k.bad").todo
    'run: mv k k.bad'
    """
    found, _, todo = error.rpartition("; ")
    return cause(found or todo, means=means, todo=todo if found else "")


def diagnose(checks: Sequence[NamedCheck]) -> Iterator[Finding]:
    """Make the checks in order, up to the first cause; name those that were not tried then."""
    found_cause = False
    for check in checks:
        if found_cause:
            yield Finding(check=check.name, verdict="not tried", found="")
            continue
        for finding in _make(check):
            found_cause |= finding.verdict == "cause"
            yield msgspec.structs.replace(finding, check=check.name)


def _make(check: NamedCheck) -> Iterator[Finding]:
    try:
        yield from check.run()
    except OSError as e:
        yield Finding(verdict="failed", found=f"can't look: {e.strerror or e}")


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if there is a cause, else 2 if a check could not look, else 0."""
    verdicts = {finding.verdict for finding in findings}
    if "cause" in verdicts:
        return CAUSE_FOUND
    return COULD_NOT_LOOK if "failed" in verdicts else WELL
