"""Fine-tune adapters of a language model in stages: each machine has some of its layers.

When a machine is lost, the others wait until it is back, and go on from the last whole step.

Make a tiny model with `python -m tools run tiny --folder /some/folder`, on each machine, then type
`pmesh run --on mac-1,mac-2 -- python fine_tune_in_stages.py /some/folder`. A number after the
folder is how many steps to train.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn, optimizers

import pmesh
import pmesh.mlx

STEPS, ROWS, LENGTH = 40, 8, 64


def mean_loss(logits: mx.array, y: mx.array) -> mx.array:
    """The mean cross-entropy over the tokens."""
    loss: mx.array = nn.losses.cross_entropy(logits, y, reduction="mean")
    return loss


def main(folder: Path, steps: int = STEPS) -> None:
    """Every rank reads all data, and computes only its own layers."""
    lm: Any = importlib.import_module("mlx_lm")
    tuner: Any = importlib.import_module("mlx_lm.tuner.utils")
    model, tokenizer = lm.load(str(folder / "model"), lazy=True)
    model.freeze()
    mx.random.seed(0)
    tuner.linear_to_lora_layers(model, len(model.layers), {"rank": 8, "scale": 20.0, "dropout": 0})
    lines = (folder / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    text = "\n".join(json.loads(line)["text"] for line in lines)
    tokens = mx.array(tokenizer.encode(text))

    def batch(step: int) -> tuple[mx.array, mx.array]:
        begins = mx.random.randint(0, len(tokens) - LENGTH - 1, (ROWS, 1), key=mx.random.key(step))
        rows = tokens[begins + mx.arange(LENGTH + 1)]
        return rows[:, :-1], rows[:, 1:]

    with pmesh.connect(job="stages") as mesh:
        training = pmesh.mlx.ElasticPipeline(
            model, mesh, mean_loss, optimizers.Adam(1e-3), micro_batch_size=2
        )
        del model
        for step, value in training.train(batch, steps):
            if step % 10 == 0 or step == steps - 1:
                print(f"stage {training.number}: step {step}, loss {value:.4f}")
        adapters = adapters_of(training.stage)
        mx.save_safetensors(f"stage-{training.number}.safetensors", adapters)
        print(f"stage {training.number}: {training.report()}")


def adapters_of(stage: pmesh.mlx.Stage) -> dict[str, mx.array]:
    """The trained arrays of a stage by path."""
    utils: Any = importlib.import_module("mlx.utils")
    return dict(utils.tree_flatten(stage.trainable_parameters()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
