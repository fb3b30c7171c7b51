"""Ranks as processes, forked by one that has imported torch, which takes seconds, for all tests.

Each line that it reads asks for a run of some ranks, and it answers with their exit codes.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

import torch
import torch._dynamo  # what DDP imports when it is constructed: here once for all ranks


def fork(rank: int, call: Callable[[int], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call(rank)
            code = 0
        except BaseException:  # noqa: BLE001 - its exit code says so
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return child


def run(
    module: str,
    function: str,
    arguments: Sequence[str],
    ranks: int,
    environment: Mapping[str, str],
) -> list[int]:
    programs = importlib.import_module(module)
    program = getattr(programs, function)
    getattr(programs, "import_libraries", lambda: None)()  # here once for all ranks

    def call(rank: int) -> None:
        os.dup2(2, 1)  # what a rank prints is no answer
        os.environ |= environment
        program(rank, *arguments)

    children = [fork(rank, call) for rank in range(ranks)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(f"{function}: the ranks have ended with {codes}", file=sys.stderr)
    return codes


def main() -> None:
    torch.set_num_threads(1)  # no thread may run when this forks
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
