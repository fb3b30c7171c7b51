"""Inference with a model whose layers lie on two machines: the time of a token, beside MLX's ring.

The model is a tiny random one, so nearly all of the time is the network's: two messages a token.
"""

import json
import statistics
import time
from typing import Any

from mlx_lm.generate import generate_step
from mlx_lm.models import qwen2

from pmesh.mlx_lm.libraries import mx
from tools.bench.systems import RankHosts, ring_settings
from tools.lab.call import words_for
from tools.lab.commands import LabError
from tools.lab.mesh import LabMesh
from tools.lab.net import loopbacks
from tools.lab.program import LabProgram

RANKS = 2
TOKENS = 200
WARM = 20  # tokens that are not counted
PATIENCE_S = 120.0
SYSTEMS = ("one process", "MLX's ring", "pmesh")


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


def work(ring: bool, tokens: int) -> None:  # noqa: FBT001 - of JSON
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


def measure(*, rounds: int = 5, tokens: int = TOKENS) -> int:
    """Let one process and two ranks have their turns; exits with 1 if the tokens differ.

    Args:
        rounds: how many turns each has.
        tokens: how many each generates in a turn.
    """
    found: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    texts: list[list[int]] = []
    with LabMesh(RANKS) as mesh:
        mesh.start_agents()
        mesh.await_view()
        for number in range(rounds):
            for name in SYSTEMS:
                for rank in _take_turn(name, mesh, number, tokens):
                    texts.append(rank["tokens"])
                    found[name].append(rank["ms"])
    for name, times in found.items():
        print(f"{name}: {statistics.median(times):.2f} ms a token")
    if any(text != texts[0] for text in texts):
        print("the tokens differ")
        return 1
    return 0


def _take_turn(name: str, mesh: LabMesh, number: int, tokens: int) -> list[dict[str, Any]]:
    """Return what each rank has printed."""
    words = words_for(work, name == SYSTEMS[1], tokens)
    nodes, variables = mesh.nodes, [dict[str, str]()] * RANKS
    if name == "one process":
        nodes = nodes[:1]
    elif name == "pmesh":
        turn = ("--wait-for", str(RANKS), "--job", f"turn-{number}")
        words = ["-m", "pmesh.cli", "mlx", *turn, *words]
    else:
        variables = ring_settings(RankHosts(hosts=loopbacks(RANKS)), mesh.folder)
    ranks = [
        mesh.start_program(node, *words, variables=its)
        for node, its in zip(nodes, variables, strict=False)
    ]
    return [_result_of(rank) for rank in ranks]


def _result_of(rank: LabProgram) -> dict[str, Any]:
    if rank.join(within_s=PATIENCE_S) or not rank.reports:
        raise LabError(rank.shown)
    return rank.reports[-1]
