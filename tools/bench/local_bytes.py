"""Bytes at the interfaces of four hosts: synchronous training beside local updates.

Each host is a network namespace with an agent and a rank of its own (Linux, as root). What a host
sends and receives, all headers included, is counted for a synchronous step and for a round of
`LocalUpdates`, without the computing between them. What agents tell each other meanwhile, whatever
is trained, is counted by itself for a second.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import pmesh
from tools.lab.call import words_for
from tools.lab.mesh import LabMesh
from tools.lab.net import NetLab
from tools.lab.program import PATIENCE_S

RANKS, VALUES, REPEATS, IDLE_S = 4, 1_044_704, 20, 5.0
INNER_STEPS = (50, 500)
REST_S, AT_REST_BYTES_PER_S = 120.0, 20_000
COUNTERS = [Path("/sys/class/net/eth0/statistics") / f"{way}_bytes" for way in ("tx", "rx")]


def carried() -> int:
    """What this host's interface has sent and received so far."""
    return sum(int(counter.read_text()) for counter in COUNTERS)


def await_rest() -> None:
    """Wait until agents have measured each other's lines, which they do at first."""
    deadline = time.monotonic() + REST_S
    before = carried()
    while time.monotonic() < deadline:
        time.sleep(IDLE_S)
        now = carried()
        if now - before < AT_REST_BYTES_PER_S * IDLE_S:
            return
        before = now
    raise SystemExit(f"agents still measure lines after {REST_S:.0f} s")


def work() -> None:
    """One rank: print what each way took of this host's interface."""
    random = np.random.default_rng()
    found: dict[str, float] = {}
    with pmesh.connect("bytes", RANKS) as mesh:
        gradients = random.normal(size=VALUES).astype(np.float32)
        await_rest()
        mesh.barrier(timeout_s=2 * REST_S)
        mesh.average_gradients(gradients)
        before = carried()
        for _ in range(REPEATS):
            mesh.average_gradients(gradients)
        mesh.barrier()
        found["step"] = (carried() - before) / REPEATS
        for compression in (None, "int8"):
            local = pmesh.LocalUpdates(mesh, inner_steps=1, compression=compression)
            weights, _ = local.begin(np.zeros(VALUES, np.float32))
            weights = local.end(weights + gradients)
            before = carried()
            for _ in range(REPEATS):
                weights, _ = local.begin(weights)
                weights = local.end(weights + gradients)
            mesh.barrier()
            found[f"round {compression}"] = (carried() - before) / REPEATS
        mesh.barrier()
        before, began = carried(), time.monotonic()
        time.sleep(IDLE_S)
        found["idle"] = (carried() - before) / (time.monotonic() - began)
    print(json.dumps(found), flush=True)


def measure() -> list[dict[str, float]]:
    """What each host has counted."""
    with LabMesh(NetLab(RANKS)) as mesh:
        mesh.start_agents()
        mesh.await_view()
        workers = [mesh.start_program(node, *words_for(work)) for node in mesh.nodes]
        for worker in workers:
            worker.join(within_s=10 * PATIENCE_S)
        return [worker.reports[-1] for worker in workers]


def run() -> None:
    """What a synchronous step and a round of local updates send."""
    answers = measure()
    mean: dict[str, Any] = {key: statistics.fmean(a[key] for a in answers) for key in answers[0]}
    print(f"{VALUES} float32 values among {RANKS} hosts, per host, sent and received:")
    print(f"  a synchronous step: {mean['step'] / 1e6:.3f} MB; at rest: {mean['idle']:.0f} B/s")
    for name in ("round None", "round int8"):
        ratios = [mean["step"] * steps / mean[name] for steps in INNER_STEPS]
        shown = ", ".join(
            f"1/{ratio:.0f} with {n} steps" for ratio, n in zip(ratios, INNER_STEPS, strict=True)
        )
        print(f"  a {name.replace(' None', '')}: {mean[name] / 1e6:.3f} MB: {shown}")
