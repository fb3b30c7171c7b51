"""A tiny model to try `pmesh mlx -- mlx_lm.lora` with, without a download.

$ python -m tools.lora tiny /tmp/tiny
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tools.lab.commands import new_app, run_app
from tools.lora.tiny import make_data, make_model

app = new_app("lora", __doc__)


@app.command
def tiny(folder: Path) -> int:
    """Make a tiny random model and data to fine-tune it with; nothing is downloaded.

    Args:
        folder: Where; the model goes to `model` in it, the data to `data`.
    """
    model, data = make_model(folder / "model"), make_data(folder / "data")
    print(f"a model of 0.2 million weights: {model}\nits data: {data}\n\ntype on each machine:")
    words = f"--model {model} --data {data} --train --iters 100 --batch-size 4 --num-layers 4"
    print(f"pmesh mlx mlx_lm.lora {words} --adapter-path {folder / 'adapters'}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The process's own arguments if None."""
    return run_app(app, arguments, starts="", needs_lab=False)  # no command starts hosts


if __name__ == "__main__":
    sys.exit(main())
