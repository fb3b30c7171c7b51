"""mlx_lm.lora as it is; at the end each rank, not only rank 0, saves its weights.

python -m tests.e2e.lora_program FOLDER ARGUMENT-OF-MLX_LM.LORA...
"""

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import lora

train = lora.train


def train_and_save(*arguments: Any, model: Any, **named: Any) -> None:  # noqa: ANN401 - mlx-lm's
    """What mlx-lm calls to train."""
    train(*arguments, model=model, **named)
    weights = dict(tree_flatten(model.trainable_parameters()))
    mx.save_safetensors(str(folder / f"{mx.distributed.init().rank()}.safetensors"), weights)


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    lora.train = train_and_save
    lora.main()
