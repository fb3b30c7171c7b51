"""The speed of the drop-in for `mx.distributed`: beside MLX's own ring, and beside `Mesh`.

    $ sudo .venv/bin/python -m tools.mlx_speed overlap
    $ .venv/bin/python -m tools.mlx_speed call

`overlap` needs Linux and root: hosts with slow lines average gradients. The computation is
imitated, since ranks on one machine would compete for its cores: where MLX would compute gradients,
the program sleeps for a time in proportion to their bytes. MLX's ring averages what is less than
32 MiB as one op, so its ranks sleep first.
"""

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tools.bench.systems import FIRST_PORT, ROOT, Place, Process
from tools.lab.agents import await_status, new_key
from tools.lab.commands import LabError, new_app, run_app
from tools.lab.net import NetLab

AGENT = "from pmesh.cli import main; main()"
START_S = 60.0
HIDDEN_BAR = 0.80
STEP_BAR = 0.75
CALL_BAR_MS = 1.0
app = new_app("mlx_speed", __doc__)


@app.command
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
    words = [str(mib), str(steps), str(compute_s)]
    with NetLab(hosts) as lab, tempfile.TemporaryDirectory(prefix="mlx-speed-") as name:
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


@app.command
def call(*, ranks: int = 2, kib: int = 1024, calls: int = 200) -> int:
    """What a sum takes longer through the drop-in than by `Mesh.all_reduce`, on one machine.

    Args:
        ranks: How many.
        kib: Of float32, an MLX array.
        calls: Of each, in turns; medians count.

    Returns:
        1 if the bar was missed.
    """
    place = Place(ranks=ranks)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlx-speed-")))
        home = folder / "mac"
        environment = _start_agent(place, 0, home, new_key(), stack, "--listen", "127.0.0.1:0")
        _await_members([environment], 1)
        words = ["call", str(kib), str(calls), "0"]
        took = _steps(place, _launched(ranks, words), [environment] * ranks, folder)
    more_ms = 1000 * (took["drop-in"] - took["mesh"])
    print(f"mesh.all_reduce {took['mesh'] * 1000:.2f} ms")
    print(f"mx.distributed.all_sum, evaluated, {took['drop-in'] * 1000:.2f} ms")
    print(f"{more_ms:+.2f} ms (bar +{CALL_BAR_MS})")
    return int(more_ms > CALL_BAR_MS)


def _run_pmesh(place: Place, folder: Path, words: Sequence[str]) -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        key = new_key()
        environments = [
            _start_agent(place, rank, folder / f"mac-{rank}", key, stack)
            for rank in range(place.ranks)
        ]
        _await_members(environments, place.ranks)
        return _steps(place, _launched(place.ranks, ["pmesh", *words]), environments, folder)


def _start_agent(
    place: Place, rank: int, home: Path, key: str, stack: contextlib.ExitStack, *options: str
) -> dict[str, str]:
    """The environment of its trainers."""
    home.mkdir(mode=0o700)
    environment = {"PYTHONPATH": str(ROOT), "PMESH_HOME": str(home), "PMESH_KEY": key}
    up = [sys.executable, "-c", AGENT, "up", "--name", home.name, *options]
    log = home.with_suffix(".log")
    stack.enter_context(Process(place, rank, up, environment=environment, log=log))
    return environment


def _await_members(environments: Sequence[dict[str, str]], count: int) -> None:
    for environment in environments:
        if not await_status(
            Path(environment["PMESH_HOME"]),
            lambda picture: len(picture["view"]["members"]) == count,
            within_s=START_S,
        ):
            raise LabError(f"the agents have not met in {START_S:.0f} s")


def _launched(ranks: int, words: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", AGENT, "mlx", "--wait-for", str(ranks), *_worker(words)]


def _run_ring(place: Place, folder: Path, words: Sequence[str]) -> dict[str, float]:
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"{place.address(r)}:{FIRST_PORT}"] for r in range(place.ranks)]))
    environments = [
        {"PYTHONPATH": str(ROOT), "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
        for rank in range(place.ranks)
    ]
    return _steps(place, [sys.executable, *_worker(["ring", *words])], environments, folder)


def _worker(words: Sequence[str]) -> list[str]:
    return ["-m", "tools.mlx_speed", "worker", *words]


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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; errors are one line."""
    return run_app(app, arguments, starts=None)


if __name__ == "__main__":
    sys.exit(main())
