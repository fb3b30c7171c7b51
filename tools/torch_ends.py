"""Short DDP trainings on a busy machine, each rank a program that ends by itself: with 0?

Half of the runs have 3 ranks and half 6, and every second pair of runs calls
`destroy_process_group`. The ranks are forked from a process that has imported torch.
"""

import gc
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from pmesh.testing import agent_in_a_thread
from tools.lab.call import words_for
from tools.lab.mesh import inherited
from tools.lab.program import keep_busy

RANKS = (3, 6)
STEPS = 10


def run(*, runs: int = 100, busy: int = 4) -> int:
    """Run so many trainings; exits with 1 if a rank ends with another code than 0.

    Args:
        runs: How many.
        busy: How many processes compute beside them without a rest.
    """
    with tempfile.TemporaryDirectory(prefix="pmesh-") as home, ExitStack() as stack:
        stack.enter_context(agent_in_a_thread(Path(home)))
        stack.enter_context(keep_busy(busy))
        # A process of its own: it forks, and must have no threads.
        command = [sys.executable, "-W", "ignore", *words_for(fork, runs)]
        settings = {"PMESH_HOME": home, "OMP_NUM_THREADS": "1"}
        return subprocess.call(command, env=inherited() | settings)


def fork(runs: int) -> int:
    """Fork the ranks of each run, and count how they end; `run` calls this."""
    import torch
    import torch._dynamo

    torch.set_num_threads(1)  # no thread may run when this forks
    gc.freeze()  # or each rank would take a second for what this has imported, not for its end
    ends = Counter[int]()
    for number in range(runs):
        ranks = RANKS[number % len(RANKS)]
        os.environ |= {"PMESH_JOB": f"run-{number}", "PMESH_WAIT_FOR": str(ranks)}
        children = [_forked(destroy=number // len(RANKS) % 2 == 0) for _ in range(ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        ends.update(codes)
        judged = "VIOLATION " if any(codes) else ""
        print(f"{judged}run {number}: the {ranks} ranks have ended with {codes}", flush=True)
    bad = ends.total() - ends[0]
    print(f"{runs} runs, {ends.total()} ranks: {bad} have ended with another code than 0")
    return 1 if bad else 0


def train(*, destroy: bool) -> None:
    """A training by torch's own DDP, as short as it can be."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import pmesh.torch  # noqa: F401 - not needed where pmesh is installed

    dist.init_process_group("pmesh")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    if destroy:
        dist.destroy_process_group()


def _forked(*, destroy: bool) -> int:
    child = os.fork()
    if child == 0:
        train(destroy=destroy)
        sys.exit(0)  # not os._exit: how Python ends is what this is about
    return child
