"""Ranks as processes, forked by one that has imported torch: `start MODULE FUNCTION RANKS ...`."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable

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


def main() -> None:
    module, function, ranks, *arguments = sys.argv[1:]
    torch.set_num_threads(1)  # no thread may run when this forks
    program = getattr(importlib.import_module(module), function)
    children = [fork(rank, lambda rank: program(rank, *arguments)) for rank in range(int(ranks))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(f"{function}: the ranks have ended with {codes}", file=sys.stderr)
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
