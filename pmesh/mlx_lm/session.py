"""One trainer's run, from the connection to the test."""

import math
from pathlib import Path
from typing import Any

from pmesh.client.connect import connect
from pmesh.client.launched import Launch
from pmesh.client.mesh import Mesh
from pmesh.mlx_lm.batches import Batches
from pmesh.mlx_lm.libraries import datasets, trainer
from pmesh.mlx_lm.prepared import Prepared
from pmesh.mlx_lm.state import State
from pmesh.mlx_lm.terms import MODEL, Terms, describe_model, describe_rows, option_terms
from pmesh.mlx_lm.training import Run, Training, evaluate

PATIENCE_S = 1800.0  # another machine may still be downloading the model


def run_session(prepared: Prepared, launch: Launch, *, resumes: bool) -> None:
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
    run = Run(
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


def _terms(prepared: Prepared, launch: Launch) -> Terms:
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
