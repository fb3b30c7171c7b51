"""Calls a function of ours as a program: `python -m tools.lab.call MODULE:FUNCTION ARGUMENTS`.

The arguments are a list in JSON; `words_for` makes the words.
"""

import json
import sys
from collections.abc import Callable
from pkgutil import resolve_name
from typing import ParamSpec

P = ParamSpec("P")


def words_for(function: Callable[P, object], *arguments: P.args, **_: P.kwargs) -> list[str]:
    """What follows `python` to call this function of a module in another process."""
    where = f"{function.__module__}:{function.__qualname__}"
    return ["-m", "tools.lab.call", where, json.dumps(arguments)]


if __name__ == "__main__":
    sys.exit(resolve_name(sys.argv[1])(*json.loads(sys.argv[2])))
