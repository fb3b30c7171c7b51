"""The speed of the drop-in for `mx.distributed`: beside MLX's own ring, and beside `Mesh`.

`overlap` needs Linux and root: hosts with slow lines average gradients. The computation is
imitated, since ranks on one machine would compete for its cores: where MLX would compute gradients,
the program sleeps for a time in proportion to their bytes. MLX's ring averages what is less than
32 MiB as one op, so its ranks sleep first.
"""

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tools.bench.systems import RankHosts, ring_settings, start_ranks
from tools.lab.call import words_for
from tools.lab.mesh import AGENT, LabMesh
from tools.lab.net import LabHost, NetLab, loopbacks
from tools.lab.program import PATIENCE_S

HIDDEN_BAR = 0.80
STEP_BAR = 0.75
CALL_BAR_MS = 1.0
Sizes: TypeAlias = tuple[int, int, float]
"""MiB of gradients, steps, and the seconds that each computes."""


def overlap(
    *, hosts: int = 3, mbit: int = 200, mib: int = 26, steps: int = 5, compute_s: float = 2.5
) -> int:
    """How much of the network's time `average_gradients` hides, and a step beside the ring's.

    Args:
        hosts: How many ranks, each on a host of its own.
        mbit: The speed of each host's line.
        mib: Of gradients, in arrays of 1 MiB.
        steps: Of each kind; medians count.
        compute_s: What the imitated computation takes in a step.

    Returns:
        1 if a bar was missed.
    """
    sizes = (mib, steps, compute_s)
    with NetLab(hosts) as lab, tempfile.TemporaryDirectory(prefix="mlx-speed-") as name:
        for host in lab.hosts:
            lab.shape(host, bits_per_s=mbit * 1_000_000)
        ours = _run_pmesh(lab.hosts, Path(name), sizes)
        ring = _run_ring(lab.hosts, Path(name), sizes)
    communication_s = ours["computed first"] - compute_s
    hidden = (ours["computed first"] - ours["overlapped"]) / communication_s
    ratio = ours["overlapped"] / ring["computed first"]
    print(f"step of MLX's ring {ring['computed first']:.2f} s")
    print(f"step of pmesh, gradients computed first {ours['computed first']:.2f} s")
    print(f"step of pmesh {ours['overlapped']:.2f} s, of which computation {compute_s:.2f} s")
    print(f"computation over communication {compute_s / communication_s:.2f}")
    print(f"hidden of the communication: {hidden:.2f} (bar {HIDDEN_BAR})")
    print(f"step over the ring's: {ratio:.2f} (bar {STEP_BAR})")
    return int(hidden < HIDDEN_BAR or ratio > STEP_BAR)


def call(*, ranks: int = 2, kib: int = 1024, calls: int = 200) -> int:
    """What a sum takes longer through the drop-in than by `Mesh.all_reduce`, on one machine.

    Args:
        ranks: How many.
        kib: Of float32, an MLX array.
        calls: Of each, in turns; medians count.

    Returns:
        1 if the bar was missed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="mlx-speed-") as folder,
        LabMesh(1) as mesh,
    ):
        mesh.start_agents()
        mesh.await_view()
        words = words_for(worker, "call", kib, calls, 0.0)
        environments = [mesh.nodes[0].environment] * ranks
        took = _steps(loopbacks(ranks), _launched(ranks, words), environments, Path(folder))
    more_ms = 1000 * (took["drop-in"] - took["mesh"])
    print(f"mesh.all_reduce {took['mesh'] * 1000:.2f} ms")
    print(f"mx.distributed.all_sum, evaluated, {took['drop-in'] * 1000:.2f} ms")
    print(f"{more_ms:+.2f} ms (bar +{CALL_BAR_MS})")
    return int(more_ms > CALL_BAR_MS)


def _run_pmesh(hosts: Sequence[LabHost], folder: Path, sizes: Sizes) -> dict[str, float]:
    with LabMesh(hosts) as mesh:
        mesh.start_agents()
        mesh.await_view()
        environments = [node.environment for node in mesh.nodes]
        words = words_for(worker, "pmesh", *sizes)
        return _steps(hosts, _launched(len(hosts), words), environments, folder)


def _launched(ranks: int, words: Sequence[str]) -> list[str]:
    return ["-c", AGENT, "mlx", "--wait-for", str(ranks), *words]


def _run_ring(hosts: Sequence[LabHost], folder: Path, sizes: Sizes) -> dict[str, float]:
    environments = ring_settings(RankHosts(hosts=tuple(hosts)), folder)
    return _steps(hosts, words_for(worker, "ring", *sizes), environments, folder)


def _steps(
    hosts: Sequence[LabHost],
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    folder: Path,
) -> dict[str, float]:
    """What the slowest rank says."""
    with contextlib.ExitStack() as stack:
        workers = start_ranks(
            hosts, "worker", [command] * len(hosts), environments, folder=folder, stack=stack
        )
        said = [json.loads(each.hear(within_s=4 * PATIENCE_S)) for each in workers]
    return {kind: max(each[kind] for each in said) for kind in said[0]}


def worker(what: str, size: int, steps: int, compute_s: float) -> None:
    """One rank, which prints the median of its steps, of each kind, in seconds."""
    kinds = _calls(size) if what == "call" else _averages(what, size, compute_s)
    took: dict[str, list[float]] = {kind: [] for kind in kinds}
    for k in range(steps + 1):
        for kind, step in kinds.items():
            _meet()
            began = time.perf_counter()
            step(k)
            took[kind].append(time.perf_counter() - began)
    medians = {kind: statistics.median(times[1:]) for kind, times in took.items()}
    print(json.dumps(medians), flush=True)


def _meet() -> None:
    """All ranks begin at the same time."""
    import mlx.core as mx  # noqa: PLC0415 - a worker's

    mx.eval(mx.distributed.all_sum(mx.ones(1)))


Steps: TypeAlias = dict[str, Callable[[int], None]]


def _calls(kib: int) -> Steps:
    import mlx.core as mx  # noqa: PLC0415

    group: Any = mx.distributed.init()
    x = mx.ones(kib * 256)
    mx.eval(x)
    return {
        "mesh": lambda _: group.run(lambda mesh: mesh.all_reduce(x)),
        "drop-in": lambda _: mx.eval(mx.distributed.all_sum(x)),
    }


def _averages(system: str, mib: int, compute_s: float) -> Steps:
    import mlx.core as mx  # noqa: PLC0415
    from mlx import nn  # noqa: PLC0415

    def gradients(k: int) -> dict[str, Any]:
        return {f"layer{i}": mx.full((1 << 18,), float(k)) * 2 for i in range(mib)}

    def computed_first(k: int) -> None:
        tree = gradients(k)
        time.sleep(compute_s)
        mx.eval(tree)
        mx.eval(nn.average_gradients(tree))

    kinds: Steps = {"computed first": computed_first}
    if system == "pmesh":
        from pmesh.client.trees import mlx  # noqa: PLC0415

        evaluate = mlx.evaluate

        def compute(arrays: Sequence[Any]) -> None:
            time.sleep(compute_s * sum(array.size for array in arrays) / (mib << 18))
            evaluate(arrays)

        def overlapped(k: int) -> None:
            mlx.evaluate = compute
            mx.eval(nn.average_gradients(gradients(k)))
            mlx.evaluate = evaluate

        kinds["overlapped"] = overlapped
    return kinds
