"""What a simulation finds."""


class Violation(AssertionError):  # noqa: N818 - what is found, as in "I3 violation"
    """An invariant of the design does not hold."""
