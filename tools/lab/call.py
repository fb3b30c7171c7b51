"""Calls a function of ours as a program: `python -m tools.lab.call MODULE:FUNCTION ARGUMENTS`.

The arguments are a list in JSON; `words_for` makes the words.
"""

import json
import sys
from collections.abc import Callable
from pkgutil import resolve_name
from typing import ParamSpec

from tools.lab.warm import ForkOrder

P = ParamSpec("P")


def words_for(function: Callable[P, object], *arguments: P.args, **_: P.kwargs) -> list[str]:
    """What follows `python` to call this function of a module in another process."""
    where = f"{function.__module__}:{function.__qualname__}"
    return ["-m", "tools.lab.call", where, json.dumps(arguments)]


def fork_for(
    function: Callable[P, object], environment: dict[str, str], *arguments: P.args, **_: P.kwargs
) -> ForkOrder:
    """The same as a fork of a `Warm` process."""
    words = words_for(function, *arguments, **_)[2:]
    return ForkOrder(program="tools.lab.call:main", arguments=tuple(words), environment=environment)


def main() -> None:
    sys.exit(resolve_name(sys.argv[1])(*json.loads(sys.argv[2])))


if __name__ == "__main__":
    main()
