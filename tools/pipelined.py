"""Inference with a model whose layers lie on two machines: the time of a token, beside MLX's ring.

$ python -m tools.pipelined measure --rounds 5

The model is a tiny random one, so nearly all of the time is the network's: two messages a token.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_lm.generate import generate_step
from mlx_lm.models import qwen2

from pmesh.mlx_lm.libraries import mx
from tools.demo import NAMES, Demo
from tools.lab.commands import LabError, new_app, run_app

RANKS = 2
TOKENS = 200
WARM = 20  # tokens that are not counted
PATIENCE_S = 120.0
SYSTEMS = ("one process", "MLX's ring", "pmesh")
app = new_app("pipelined", __doc__)


def new_model() -> qwen2.Model:
    """The same random weights in each process."""
    mx.random.seed(5)
    return qwen2.Model(
        qwen2.ModelArgs(
            model_type="qwen2",
            hidden_size=64,
            num_hidden_layers=4,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=512,
        )
    )


@app.command
def work(*, ring: bool = False, tokens: int = TOKENS) -> int:
    """Be one rank; print the tokens, and the median milliseconds of one.

    Args:
        ring: over MLX's own ring, else as `mx.distributed.init()` says.
        tokens: how many to generate.
    """
    group = mx.distributed.init(strict=True, backend="ring") if ring else mx.distributed.init()
    model: Any = new_model()  # mlx-lm has no types
    if group.size() > 1:
        model.model.pipeline(group)
    mx.eval(model.parameters())
    made: list[int] = []
    times: list[float] = []
    before = time.perf_counter()
    for token, _ in generate_step(mx.array([1, 2, 3]), model, max_tokens=tokens):
        now = time.perf_counter()
        made.append(int(token))
        times.append(now - before)
        before = now
    mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group))  # MLX's ring ends with its first
    millis = round(1e3 * statistics.median(times[min(WARM, tokens // 2) :]), 3)
    print(json.dumps({"size": group.size(), "tokens": made, "ms": millis}), flush=True)
    return 0


@app.command
def measure(*, rounds: int = 5, tokens: int = TOKENS) -> int:
    """Let one process and two ranks have their turns; exits with 1 if the tokens differ.

    Args:
        rounds: how many turns each has.
        tokens: how many each generates in a turn.
    """
    found: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    texts: list[list[int]] = []
    with (
        tempfile.TemporaryDirectory(prefix="pmesh-") as folder,
        Demo(Path(folder) / "demo") as demo,
    ):
        demo.start_agents(multicast=False)
        if not demo.all_meet(PATIENCE_S):
            raise LabError("the agents have not met")
        for number in range(rounds):
            for name in SYSTEMS:
                for rank in _take_turn(name, demo, number, tokens):
                    texts.append(rank["tokens"])
                    found[name].append(rank["ms"])
    for name, times in found.items():
        print(f"{name}: {statistics.median(times):.2f} ms a token")
    if any(text != texts[0] for text in texts):
        print("the tokens differ")
        return 1
    return 0


def _take_turn(name: str, demo: Demo, number: int, tokens: int) -> list[dict[str, Any]]:
    """Return what each rank has printed."""
    options = ["--tokens", str(tokens)]
    work = ["-m", "tools.pipelined", "work", *options]
    if name == "one process":
        ranks = [demo.start(work, name=NAMES[0], output=subprocess.PIPE)]
    elif name == "pmesh":
        mesh = ["-m", "pmesh.cli", "mlx", "--wait-for", str(RANKS), "--job", f"turn-{number}"]
        ranks = [
            demo.start([*mesh, *work], name=agent, output=subprocess.PIPE)
            for agent in NAMES[:RANKS]
        ]
    else:
        ranks = _start_ring(demo.directory, [*work, "--ring"])
    return [_result_of(rank) for rank in ranks]


def _start_ring(folder: Path, work: Sequence[str]) -> list[subprocess.Popen[str]]:
    # MLX's ring takes its ports from a file, so they are free now and, mostly, a moment later.
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(RANKS)]
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]))
    for each in sockets:
        each.close()
    return [
        subprocess.Popen(
            [sys.executable, *work],
            env=os.environ | {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]


def _result_of(rank: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        output, _ = rank.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        rank.kill()
        raise LabError(f"a rank has not ended in {PATIENCE_S:.0f} s") from None
    lines = [line for line in output.splitlines() if line.startswith('{"size"')]
    if rank.returncode or not lines:
        raise LabError(f"a rank has ended with {rank.returncode}:\n{output}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The process's own arguments if None."""
    return run_app(app, arguments, starts=None, needs_lab=False)


if __name__ == "__main__":
    sys.exit(main())
