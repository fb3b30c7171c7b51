"""How many examples of a property are tried."""

from typing import Any

from hypothesis import settings

ALL = 100
QUICK = 25
"""The same part of each property's own number: `make test` looks less closely than CI."""


def examples(count: int, **options: Any) -> settings:  # noqa: ANN401 - those of `settings`
    """Return settings for so many examples, or for a part of them in `make test`."""
    return settings(max_examples=max(1, count * settings().max_examples // ALL), **options)
