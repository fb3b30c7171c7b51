"""A tiny llama with adapters, made in the thread that calls, and runs of it on a simulated mesh."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from mlx.optimizers import SGD, Adam
from mlx_lm.models import llama
from mlx_lm.tuner.utils import linear_to_lora_layers

import pmesh
from pmesh.mlx_lm.batches import Batches
from pmesh.mlx_lm.libraries import mx, trainer
from pmesh.mlx_lm.state import State
from pmesh.mlx_lm.training import RunSetup, Training, digest

VOCABULARY = 32


class TokenRows:
    """A data set of these rows of tokens."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self._rows = rows

    def itemlen(self, idx: int) -> int:
        return len(self._rows[idx])

    def __getitem__(self, idx: int) -> tuple[Sequence[int], int]:
        return self._rows[idx], 0

    def __len__(self) -> int:
        return len(self._rows)


def patterned_rows(count: int, *, seed: int) -> TokenRows:
    """Random rows of different lengths, each with a pattern that can be learned."""
    random = np.random.default_rng(seed)
    return TokenRows(
        [
            [int(start + i * step) % VOCABULARY for i in range(length)]
            for start, step, length in random.integers(1, 20, (count, 3))
        ]
    )


def make_model(kind: str = "lora", *, seed: int = 0, dropout: float = 0.0, rank: int = 4) -> Any:  # noqa: ANN401 - MLX's modules have no types
    mx.random.seed(seed)
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
    }
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.freeze()
    if kind == "full":
        for layer in model.layers:
            layer.unfreeze()
    else:
        adapters = {"rank": rank, "scale": 2.0, "dropout": dropout}
        linear_to_lora_layers(model, 2, adapters, use_dora=kind == "dora")
    mx.eval(model.parameters())
    return model


@dataclass(slots=True)
class Said:
    """mlx-lm's callback, which keeps what it is told."""

    losses: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    validations: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def on_train_loss_report(self, info: dict[str, Any]) -> None:
        self.losses.append(info)

    def on_val_loss_report(self, info: dict[str, Any]) -> None:
        self.validations.append(info)


@dataclass(slots=True)
class LoraRank:
    """One rank: everything that its thread makes."""

    mesh: pmesh.Mesh
    folder: Path
    said: Said = field(default_factory=Said)
    state: State | None = None

    def train(self, **options: Any) -> str:  # noqa: ANN401 - of any kind
        """Train, and return the hash of the adapters."""
        state, run = prepare(self.folder, self.said, **options)
        self.state = state
        Training(self.mesh, run, state).run()
        return digest(state.adapters())


def prepare(folder: Path, said: Said | None = None, **options: Any) -> tuple[State, RunSetup]:  # noqa: ANN401
    """A state and what to do with it, as a session makes them."""
    chosen: dict[str, Any] = {
        "kind": "lora",
        "batch_size": 5,
        "iters": 6,
        "accumulate": 1,
        "every": 2,
        "rate": 0.1,
        "optimizer": "sgd",
        "compression": None,
        "terms": {"--batch-size": "5"},
        "dropout": 0.0,
        "rank": 4,
        "model_seed": 0,
        "valid": True,
        "val_batches": -1,
        "resumes": False,
    } | options
    model = make_model(
        chosen["kind"], seed=chosen["model_seed"], dropout=chosen["dropout"], rank=chosen["rank"]
    )
    optimizer = (SGD if chosen["optimizer"] == "sgd" else Adam)(learning_rate=chosen["rate"])
    state = State(model, optimizer, chosen["terms"])
    folder.mkdir(exist_ok=True)

    def batches(count: int, seed: int) -> Batches:
        rows, size = patterned_rows(count, seed=seed), chosen["batch_size"]
        return Batches(rows, batch_size=size, max_length=64, seed=1, name="training")

    args = SimpleNamespace(
        iters=chosen["iters"],
        grad_accumulation_steps=chosen["accumulate"],
        steps_per_report=chosen["every"],
        steps_per_eval=chosen["every"],
        steps_per_save=chosen["every"],
        val_batches=chosen["val_batches"],
        clear_cache_threshold=0,
        max_seq_length=64,
    )
    run = RunSetup(
        args=args,
        loss=chosen.get("loss", trainer.default_loss),
        seed=0,
        compression=chosen["compression"],
        callback=said,
        train=batches(40, 1),
        valid=batches(15, 2) if chosen["valid"] else None,
        folder=folder,
        resumes=chosen["resumes"],
    )
    return state, run
