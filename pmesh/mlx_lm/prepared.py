"""Runs mlx-lm's own preparations: options, model, data, adapters and optimizer, but not its loop.

This calls mlx-lm's functions as its command does; meanwhile some of them are replaced by ours.
"""

import contextlib
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pmesh.errors import UsageError
from pmesh.home_paths import is_in_launch_copy
from pmesh.mlx_lm.files import replace
from pmesh.mlx_lm.halves import Loss
from pmesh.mlx_lm.libraries import lora, trainer

_POSITIVE = (
    *("batch_size", "iters", "grad_accumulation_steps", "max_seq_length"),
    *("steps_per_report", "steps_per_eval", "save_every"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What mlx-lm passes to its training loop, and the data sets as they were loaded."""

    options: Any
    """All options, from the command line, the YAML file and mlx-lm's defaults."""
    args: Any
    """mlx-lm's `TrainingArgs`."""
    model: Any
    optimizer: Any
    loss: Loss
    train_set: Any
    valid_set: Any
    test_set: Any
    callback: Any


def parse(arguments: list[str]) -> Any:
    """Return the options that mlx-lm's `run` would get.

    Raises:
        UsageError: There is nothing to train, or a number is too small.
        SystemExit: The parser has refused the options, and has printed why.
    """
    found: list[Any] = []
    typed = sys.argv
    with _replaced(run=found.append), _explain_errors("can't read the options"):
        sys.argv = ["mlx_lm.lora", *arguments]
        try:
            lora.main()
        finally:
            sys.argv = typed
    (options,) = found
    options.adapter_path = str(Path(options.adapter_path).expanduser())
    _check(options)
    return options


def prepare(options: Any) -> Prepared:
    """Load the model and the data, and make the adapters and the optimizer.

    Raises:
        UsageError: Something is missing or does not fit; the message says what.
    """
    np.random.seed(options.seed)  # noqa: NPY002 - as mlx-lm does, for the libraries that it calls
    callback = None
    if options.report_to:
        with _explain_errors(f"can't report to {options.report_to!r}, from --report-to"):
            callback = lora.get_reporting_callbacks(
                options.report_to,
                project_name=options.project_name,
                log_dir=options.adapter_path,
                config=vars(options),
            )
    print(f"Loading the model {options.model}", flush=True)
    with _explain_errors(
        f"can't load the model {_shown(options, 'model')}",
        "--model takes a folder with config.json, *.safetensors and a tokenizer, or the name of a "
        "Hugging Face repository that this machine can reach",
    ):
        trust = options.trust_remote_code
        model, tokenizer = lora.load(
            options.model, tokenizer_config={"trust_remote_code": trust}, trust_remote_code=trust
        )
    print(f"Loading the data {options.data}", flush=True)
    with _explain_errors(
        f"can't load the data {_shown(options, 'data')}",
        "--data takes a folder with train.jsonl, and valid.jsonl and test.jsonl where they are "
        "wanted, or the name of a Hugging Face data set that this machine can reach",
    ):
        train_set, valid_set, test_set = lora.load_dataset(options, tokenizer)
    given: dict[str, Any] = {}
    with (
        _replaced(
            train=given.update,
            save_config=partial(_save_config, lora.save_config),
        ),
        _explain_errors("mlx-lm can't prepare the training"),
    ):
        lora.train_model(options, model, train_set, valid_set, callback)
        if given["args"].grad_checkpoint:
            trainer.grad_checkpoint(model.layers[0])
    return Prepared(
        options=options,
        args=given["args"],
        model=model,
        optimizer=given["optimizer"],
        loss=trainer.default_loss,
        train_set=train_set,
        valid_set=valid_set,
        test_set=test_set,
        callback=callback,
    )


def _check(options: Any) -> None:
    if not options.train:
        raise UsageError("there is nothing to train: give --train; 'pmesh mlx' runs the rest as is")
    for name in _POSITIVE:
        if getattr(options, name) < 1:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} is at least 1, not {getattr(options, name)}")
    if options.iters < options.grad_accumulation_steps:
        raise UsageError(
            f"--iters {options.iters} ends before the first update, which comes after "
            f"--grad-accumulation-steps {options.grad_accumulation_steps}: give more --iters"
        )
    if is_in_launch_copy(Path(options.adapter_path).resolve()):
        raise UsageError(
            f"--adapter-path {options.adapter_path} lies in this launch's own copy of the "
            "directory, where no later 'pmesh run --sync' would resume from it; give a folder "
            "outside of it, such as --adapter-path '~/adapters'"
        )
    if Path(options.adapter_path).is_file():
        raise UsageError(f"--adapter-path {options.adapter_path} is a file: name a folder")


def _shown(options: Any, name: str) -> str:
    value = getattr(options, name)
    is_default = value == lora.CONFIG_DEFAULTS[name]
    return f"{value!r}, mlx-lm's default as there is no --{name}" if is_default else repr(value)


def _save_config(save: Callable[..., object], config: dict[str, Any], path: Path) -> None:
    replace(path, partial(save, config))


@contextlib.contextmanager
def _replaced(**functions: Callable[..., object]) -> Generator[None]:
    """Replace functions of mlx-lm's module by ours inside the block."""
    before = {name: getattr(lora, name) for name in functions}
    for name, function in functions.items():
        setattr(lora, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(lora, name, function)


@contextlib.contextmanager
def _explain_errors(what: str, hint: str = "") -> Generator[None]:
    """Turn any exception of mlx-lm and its libraries into a UsageError of one sentence."""
    try:
        yield
    except UsageError:
        raise
    except Exception as e:
        lines = str(e).strip().splitlines() or [""]
        why = " ".join(lines[:3])
        raise UsageError(f"{what}: {type(e).__name__}: {why}{'; ' if hint else ''}{hint}") from e
