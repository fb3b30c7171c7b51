"""How much of the network's time average_gradients hides on a slow line, beside MLX's own ring.

    $ sudo .venv/bin/python -m tools.mlx_overlap

Linux, root, mlx. Three hosts with lines of 200 Mbit/s average 26 MiB of gradients. The computation
is imitated, since three ranks on one machine would compete for its cores: where MLX would compute
gradients, the program sleeps for a time in proportion to their bytes. MLX's ring averages what is
less than 32 MiB as one op, so its ranks sleep first.
"""

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.bench.systems import FIRST_PORT, ROOT, Place, Process
from tools.lab.agents import await_status, new_key
from tools.lab.commands import LabError, new_app, run_app
from tools.lab.net import NetLab

AGENT = "from pmesh.cli import main; main()"
START_S = 60.0
HIDDEN_BAR = 0.80
STEP_BAR = 0.75
app = new_app("mlx_overlap", __doc__)


@app.default
def measure(
    *, hosts: int = 3, mbit: int = 200, mib: int = 26, steps: int = 5, compute_s: float = 2.1
) -> int:
    """Measure both, one after the other; nothing else should run meanwhile.

    Args:
        hosts: How many ranks, each on a host of its own.
        mbit: The speed of each host's line.
        mib: Of gradients, in arrays of 1 MiB.
        steps: Of each kind; medians count.
        compute_s: What the imitated computation takes in a step.

    Returns:
        1 if a bar was missed.
    """
    words = [str(mib), str(steps), str(compute_s)]
    with NetLab(hosts) as lab, tempfile.TemporaryDirectory(prefix="overlap-") as name:
        for host in lab.hosts:
            lab.shape(host, bits_per_s=mbit * 1_000_000)
        place = Place(ranks=hosts, hosts=lab.hosts)
        ours, ring = _run_pmesh(place, Path(name), words), _run_ring(place, Path(name), words)
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


def _run_pmesh(place: Place, folder: Path, words: Sequence[str]) -> dict[str, float]:
    key = new_key()
    environments: list[dict[str, str]] = []
    with contextlib.ExitStack() as stack:
        for rank in range(place.ranks):
            home = folder / f"mac-{rank}"
            home.mkdir(mode=0o700)
            environments.append(
                {"PYTHONPATH": str(ROOT), "PMESH_HOME": str(home), "PMESH_KEY": key}
            )
            up = [sys.executable, "-c", AGENT, "up", "--name", home.name]
            log = folder / f"{home.name}.log"
            stack.enter_context(Process(place, rank, up, environment=environments[-1], log=log))
        for environment in environments:
            if not await_status(
                Path(environment["PMESH_HOME"]),
                lambda picture: len(picture["view"]["members"]) == place.ranks,
                within_s=START_S,
            ):
                raise LabError(f"the agents have not met in {START_S:.0f} s")
        options = ["mlx", "--wait-for", str(place.ranks)]
        command = [sys.executable, "-c", AGENT, *options]
        return _steps(place, [*command, *_worker("pmesh", words)], environments, folder)


def _run_ring(place: Place, folder: Path, words: Sequence[str]) -> dict[str, float]:
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"{place.address(r)}:{FIRST_PORT}"] for r in range(place.ranks)]))
    environments = [
        {"PYTHONPATH": str(ROOT), "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
        for rank in range(place.ranks)
    ]
    return _steps(place, [sys.executable, *_worker("ring", words)], environments, folder)


def _worker(system: str, words: Sequence[str]) -> list[str]:
    return ["-m", "tools.mlx_overlap", "worker", system, *words]


def _steps(
    place: Place,
    command: Sequence[str],
    environments: Sequence[dict[str, str]],
    folder: Path,
) -> dict[str, float]:
    """What the slowest rank says."""
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                Process(place, rank, command, environment=each, log=folder / f"worker-{rank}.log")
            )
            for rank, each in enumerate(environments)
        ]
        said = [json.loads(each.hear(timeout_s=4 * START_S)) for each in workers]
    return {kind: max(each[kind] for each in said) for kind in said[0]}


@app.command(show=False)
def worker(system: str, mib: int, steps: int, compute_s: float) -> None:
    """One rank, which prints the median of its steps, of each kind, in seconds."""
    import mlx.core as mx  # noqa: PLC0415 - a worker's
    from mlx import nn  # noqa: PLC0415

    count = mib * (1 << 18)

    def gradients(k: int) -> dict[str, Any]:
        return {f"layer{i}": mx.full((1 << 18,), float(k)) * 2 for i in range(mib)}

    def computed_first(k: int) -> None:
        tree = gradients(k)
        time.sleep(compute_s)
        mx.eval(tree)
        mx.eval(nn.average_gradients(tree))

    kinds: dict[str, Callable[[int], None]] = {"computed first": computed_first}
    if system == "pmesh":
        from pmesh.client.trees import mlx  # noqa: PLC0415

        evaluate = mlx.evaluate

        def compute(arrays: Sequence[Any]) -> None:
            time.sleep(compute_s * sum(array.size for array in arrays) / count)
            evaluate(arrays)

        def overlapped(k: int) -> None:
            mlx.evaluate = compute
            mx.eval(nn.average_gradients(gradients(k)))
            mlx.evaluate = evaluate

        kinds["overlapped"] = overlapped
    took: dict[str, list[float]] = {kind: [] for kind in kinds}
    for k in range(steps + 1):
        for kind, step in kinds.items():
            mx.eval(mx.distributed.all_sum(mx.ones(1)))
            began = time.perf_counter()
            step(k)
            took[kind].append(time.perf_counter() - began)
    medians = {kind: statistics.median(times[1:]) for kind, times in took.items()}
    print(json.dumps(medians), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; errors are one line."""
    return run_app(app, arguments, starts=None)


if __name__ == "__main__":
    sys.exit(main())
