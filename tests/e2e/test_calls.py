"""Calls between ranks, with real agents and trainers, of which one is killed."""

import json

import pytest

from tests.e2e.harness import TIMEOUT_S, Fleet, Running, StartedAgent
from tools.lab.program import await_that

pytestmark = pytest.mark.slow

# Rank 2 is killed while it runs a call of rank 0, and holds an object that rank 1 keeps.
TRAINER = """
import json
import threading
import numpy as np
import pmesh

let_go = threading.Event()

class Held:
    remote_methods = ("greet",)

    def greet(self):
        return "hello"

    def __del__(self):
        let_go.set()

with pmesh.connect(job="calls", wait_for=3) as mesh:
    mesh.rpc.register(Held)

    @mesh.rpc.register
    def total(x):
        return float(x.sum())

    @mesh.rpc.register
    def hang():
        held = mesh.rpc.remote(1, "Held")
        print("hangs:", held.call("greet"), flush=True)
        threading.Event().wait()

    mesh.barrier()
    found = None
    if mesh.rank == 0:
        large = np.ones(300_000)
        calls = [mesh.rpc.call_async(1, "total", large[:n]) for n in (9, 300_000)]
        found = [call.wait() for call in calls]
        try:
            mesh.rpc.call(2, "hang", timeout_s=3600)
        except pmesh.RankLost as e:
            found.append(str(e))
        found.append(mesh.rpc.map("total", [large[:n] for n in range(20)]))
    elif mesh.rank == 1:
        found = let_go.wait(20)
    else:
        threading.Event().wait()
    mesh.barrier()
    print(json.dumps([mesh.rank, found]), flush=True)
"""


def test_a_rank_that_is_killed_in_a_call_fails_it_at_once_and_frees_what_it_held(
    fleet: Fleet, ring: list[StartedAgent]
) -> None:
    trainers = [fleet.start_trainer(at, TRAINER) for at in ring]
    hung: list[Running] = []

    def hangs() -> bool:
        hung.extend(t for t in trainers if "hangs: hello" in t.output)
        return bool(hung)

    await_that(hangs, "a call that hangs", within_s=TIMEOUT_S, of=trainers)
    (hanging,) = hung
    hanging.end()
    others = [t for t in trainers if t is not hanging]
    said = sorted(json.loads(t.await_end().splitlines()[-1]) for t in others)

    assert said[1] == [1, True]
    small, large, why, mapped = said[0][1]
    assert (small, large) == (9, 300_000)
    assert why.startswith("rank 2 (mac-")
    assert mapped == list(range(20))
