"""One trainer's run: mlx-lm's own preparations, then our training, from the connection to the test.

The preparations are options, model, data, adapters and optimizer. mlx-lm's functions are called for
them as its command does; meanwhile some of them are replaced by ours.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pmesh.client.connect import connect
from pmesh.client.mesh import Mesh
from pmesh.errors import UsageError
from pmesh.home_paths import expand_user, is_in_launch_copy
from pmesh.launches.client.launched import MLXLaunch
from pmesh.mlx_lm.batches import Batches
from pmesh.mlx_lm.halves import Loss
from pmesh.mlx_lm.libraries import datasets, lora, trainer
from pmesh.mlx_lm.state import State, replace
from pmesh.mlx_lm.terms import MODEL, RunTerms, describe_model, describe_rows, option_terms
from pmesh.mlx_lm.training import RunSetup, Training, evaluate

PATIENCE_S = 1800.0  # another machine may still be downloading the model
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
    options.adapter_path = str(expand_user(Path(options.adapter_path)))
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


def run_session(prepared: Prepared, launch: MLXLaunch, *, resumes: bool) -> None:
    """Join the job, train, and test if the options ask for it.

    Raises:
        UsageError: There are too few data, the checkpoint is from another run, or the options, the
            model or the data differ between machines.
        PmeshError: As for `pmesh.connect` and `Mesh.sync`.
    """
    trainer.maybe_set_recommended_wired_limit()
    options = prepared.options
    folder = Path(options.adapter_path)
    state = State(prepared.model, prepared.optimizer, _terms(prepared, launch))
    run = RunSetup(
        args=prepared.args,
        loss=prepared.loss,
        seed=options.seed,
        compression=launch.compression or None,
        callback=prepared.callback,
        train=_batches(prepared, prepared.train_set, "training"),
        valid=_batches(prepared, prepared.valid_set, "validation") if prepared.valid_set else None,
        folder=folder,
        resumes=resumes,
    )
    test = _batches(prepared, prepared.test_set, "test") if options.test else None
    with connect(launch.job, launch.wait_for, PATIENCE_S, on_superseded="sync") as mesh:
        Training(mesh, run, state).run()
        if test is not None:
            _test(mesh, prepared, test)


def _terms(prepared: Prepared, launch: MLXLaunch) -> RunTerms:
    return {
        **option_terms(prepared.options.__dict__),
        "--compression": launch.compression or "the agent's",
        MODEL: describe_model(prepared.model),
        "training set": describe_rows(prepared.train_set),
        "validation set": describe_rows(prepared.valid_set),
    }


def _batches(prepared: Prepared, dataset: Any, name: str) -> Batches:
    return Batches(
        datasets.CacheDataset(dataset),
        batch_size=prepared.options.batch_size,
        max_length=prepared.options.max_seq_length,
        seed=prepared.options.seed,
        name=name,
    )


def _test(mesh: Mesh, prepared: Prepared, batches: Batches) -> None:
    loss = None
    while loss is None:  # None if a rank was lost
        count = prepared.options.test_batches
        loss = evaluate(mesh, prepared.model, prepared.loss, batches, count)
    if mesh.rank == 0:
        print(f"Test loss {loss:.3f}, Test ppl {math.exp(loss):.3f}.", flush=True)


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
