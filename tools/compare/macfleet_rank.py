"""One rank of MacFleet, run by the Python that has MacFleet: `macfleet_rank.py JOB RANK SETTINGS`.

It imports nothing of ours, as that Python has none of it. Trainings go through `Pool.train`, which
MacFleet's own pages recommend; single calls through `form_mesh` and `mesh.group.allreduce`, as the
docstring of `macfleet.training.mesh` shows them. What it prints is what `tools.compare.ranks` does.
"""

import asyncio
import hashlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

PORT_STEP = 10
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def say(**facts: object) -> None:
    rank = int(sys.argv[2])
    print(
        json.dumps({"rank": rank, "pid": os.getpid(), "at": time.monotonic()} | facts), flush=True
    )


def train(rank: int, settings: dict[str, Any]) -> None:
    """Steps of `Pool.train`; its loss function, which it calls in each step, prints them."""
    torch: Any = importlib.import_module("torch")
    macfleet: Any = importlib.import_module("macfleet")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = settings["inputs"]
    model = torch.nn.Linear(inputs, settings["outputs"], bias=False)
    if "data" in settings:
        data = np.load(settings["data"])
        dataset = (data["x"], data["y"])
    else:
        dataset = (np.ones((600, inputs), np.float32), np.zeros(600, np.int64))
    step = 0

    def loss_of(outputs: Any, targets: Any) -> Any:  # noqa: ANN401 - tensors
        nonlocal step
        weights = model.weight.detach().numpy()
        digest = hashlib.sha256(weights.tobytes()).hexdigest()[:12]
        sent = int(SENT.read_text()) if settings["counts"] else 0
        say(step=step, weights=digest, sent=sent)
        step += 1
        time.sleep(settings["pause_s"])
        return torch.nn.functional.cross_entropy(outputs, targets)

    hosts, port = settings["hosts"], settings["port"]
    with macfleet.Pool(
        name=f"rank-{rank}",
        token=settings["tokens"][rank],
        port=port + PORT_STEP * rank,
        enable_pool_distributed=True,
        quorum_size=len(hosts),
        quorum_timeout_sec=settings["join_s"],
        peers=[f"{h}:{port + PORT_STEP * k}" for k, h in enumerate(hosts) if k != rank],
    ) as pool:
        said = pool.train(
            model=model,
            dataset=dataset,
            epochs=settings["epochs"],
            batch_size=32 * len(hosts),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
            loss_fn=loss_of,
            compression=settings["compression"],
            device="cpu",
            distributed=True,
        )
    say(result={name: said[name] for name in ("degraded", "unsynced_steps", "params_sha256")})


async def form(rank: int, settings: dict[str, Any]) -> Any:  # noqa: ANN401 - MacFleet's
    """Its mesh of all ranks; their names sort as the ranks do."""
    mesh: Any = importlib.import_module("macfleet.training.mesh")
    auth: Any = importlib.import_module("macfleet.security.auth")
    ports = range(settings["port"], settings["port"] + PORT_STEP * 100, PORT_STEP)
    nodes = [
        mesh.NodeSpec(f"rank-{k:02}", host, port)
        for k, (host, port) in enumerate(zip(settings["hosts"], ports, strict=False))
    ]
    security = auth.SecurityConfig(token=settings["tokens"][rank])
    return await mesh.form_mesh(nodes[rank].node_id, nodes, security=security)


async def reduce_once(rank: int, settings: dict[str, Any]) -> None:
    mesh = await form(rank, settings)
    say(ready=True)
    total = await mesh.group.allreduce(
        np.full(settings["counts_of_ranks"][rank], rank + 1.0, np.float32), op="sum"
    )
    say(size=int(total.size), values=sorted({float(x) for x in total})[:5])
    await mesh.close()


async def serve(rank: int, settings: dict[str, Any]) -> None:
    """All-reduces as orders of `tools.bench` ask for them, each compared with the right sum."""
    mesh = await form(rank, settings)
    print("{}", flush=True)
    ranks = len(settings["hosts"])
    for line in sys.stdin:
        order = json.loads(line)
        if order["what"] == "end":
            break
        base = np.resize(np.arange(4099, dtype=np.float32), order["count"])
        mine = base * np.float32(rank + 1)
        right = base * np.float32(ranks * (ranks + 1) // 2)
        seconds, wrong = [], 0
        await mesh.group.allreduce(np.ones(1, np.float32), op="sum")
        for _ in range(order.get("times", 1)):
            began = time.perf_counter()
            total = await mesh.group.allreduce(mine, op="sum")
            seconds.append(time.perf_counter() - began)
            wrong += not np.array_equal(total, right)
            await mesh.group.allreduce(np.ones(1, np.float32), op="sum")
        print(json.dumps({"seconds": seconds, "wrong": wrong}), flush=True)
    await mesh.close()


def main() -> None:
    job, rank, settings = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    if job == "serve":
        asyncio.run(serve(rank, settings))
        return
    try:
        if job == "train":
            train(rank, settings)
        else:
            asyncio.run(reduce_once(rank, settings))
    except Exception as e:  # noqa: BLE001 - what it raises is what is compared
        say(error=f"{type(e).__name__}: {e}")
        sys.exit(1)


if __name__ == "__main__":
    main()
