"""`mlx_lm.lora` on machines that come and go: mlx-lm's options and data, our training loop.

A run passes through `session` (mlx-lm's own preparations, then the connection), `training` with
`batches` (which rows a rank takes) and `halves` (the compiled functions), and `state` (what is
saved). `terms` checks what all machines must share.
"""

import importlib.util
import os

from pmesh.client.control import ask_status
from pmesh.compression.schemes import named
from pmesh.errors import UsageError
from pmesh.home_paths import home_directory
from pmesh.launches.client.launched import MLXLaunch

__all__ = ["train"]

JOB = "mlx_lm.lora"
_NO_RESUME = "--no-resume"


def train(arguments: list[str]) -> int:
    """Run `mlx_lm.lora` with these options as one rank of the job that `pmesh mlx` has named.

    Options, data sets and adapters are mlx-lm's. Only `--no-resume` is ours: it begins anew even if
    the folder of the adapters has a checkpoint. Without the variables of `pmesh mlx` the job is
    `mlx_lm.lora`, and begins with this trainer.

    Args:
        arguments: The words after `mlx_lm.lora`. `--train` is among them or in a YAML file.

    Returns:
        The exit code, 0.

    Raises:
        UsageError: mlx-lm is not installed; or an option, the model or the data can't be used, or
            differs between machines.
        PmeshError: As for `pmesh.connect` and `Mesh.sync`.
        SystemExit: mlx-lm's parser has refused the options, and has printed why.
    """
    launch = MLXLaunch.of(os.environ) or MLXLaunch(job=JOB, wait_for=1)
    if launch.compression not in {"", "none"}:
        named(launch.compression)
    ask_status(home_directory(None))  # fails now without an agent, not after loading the model
    if importlib.util.find_spec("mlx_lm") is None:
        raise UsageError(
            "mlx-lm is not installed beside pmesh: pip install 'mlx-lm>=0.32' in the environment "
            "that has pmesh"
        )
    # Last, since MLX and mlx-lm take seconds to import.
    from pmesh.mlx_lm.session import parse, prepare, run_session  # noqa: PLC0415

    options = parse([word for word in arguments if word != _NO_RESUME])
    run_session(prepare(options), launch, resumes=_NO_RESUME not in arguments)
    return 0
