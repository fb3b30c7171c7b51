"""The training loop: mlx-lm's iterations, validations, reports and files, on ranks that change.

A step is one update of the weights, after `grad_accumulation_steps` iterations. It begins with
`mesh.sync`, where machines enter. The gradients are averaged between the two compiled halves, on
the host and never in the GPU's queue. A rank's decisions depend only on the state that `sync` gives
to all ranks, and on the world that all ranks see alike (O5). So all ranks decide alike.

If a rank is lost in a step, all ranks discard the step and repeat it: the remaining ranks share the
rows of the batch. So each update uses the whole batch, and a loss changes only the rounding.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pmesh.client.checkpoints.checkpoints import Checkpoints
from pmesh.client.mesh import Mesh
from pmesh.errors import RankLost, RosterChanged, UsageError
from pmesh.mlx_lm.batches import Batches
from pmesh.mlx_lm.halves import (
    Gradients,
    Loss,
    clear_cache,
    compile_update,
    evaluate_in_groups,
    loss_of,
)
from pmesh.mlx_lm.libraries import mx
from pmesh.mlx_lm.state import State
from pmesh.mlx_lm.terms import check_alike

# The weight of a rank without rows: if no rank has any, the average must still be a number.
_NO_WEIGHT = 1e-20
CHECKPOINTS = "pmesh_checkpoints"
"""The folder beside the adapters with this machine's part of the checkpoints."""
_NOT_FINITE = (
    "are not finite: the training has diverged. Begin anew with --no-resume, and take a lower "
    "--learning-rate"
)
REPLICAS = 2  # so any one machine may be lost with its disk


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """The options of a run, its data and its folder."""

    args: Any
    """mlx-lm's `TrainingArgs`."""
    loss: Loss
    seed: int
    compression: str | None
    callback: Any
    """mlx-lm's `TrainingCallback`, or None."""
    train: Batches
    valid: Batches | None
    folder: Path
    """The folder of the adapters."""
    resumes: bool
    """True if the run continues from the last checkpoint, if there is one."""

    @property
    def updates_after(self) -> int:
        """The number of iterations in a step."""
        count: int = self.args.grad_accumulation_steps
        return count

    @property
    def last(self) -> int:
        """The last iteration that ends a step: later ones would change nothing."""
        iterations: int = self.args.iters
        return iterations - iterations % self.updates_after


@dataclass(slots=True)
class _Since:
    """The work of this rank since the last report."""

    loss: float = 0.0
    targets: int = 0
    iterations: int = 0
    seconds: float = 0.0


class Training:
    """One rank of a run."""

    def __init__(self, mesh: Mesh, run: RunSetup, state: State) -> None:
        self._mesh = mesh
        self._run = run
        self._state = state
        self._since = _Since()
        self._names: tuple[str, ...] = ()
        self._truncated = False
        # A save in the background would keep its arrays during the next step. In full fine-tuning
        # that takes as much memory again as the weights and the optimizer.
        self._checkpoints = Checkpoints(
            run.folder / CHECKPOINTS, mesh, keep=1, replicas=REPLICAS, asynchronous=False
        )
        self._gradients = Gradients(state.model, run.loss)
        self._update = compile_update(state.optimizer)

    def run(self) -> None:
        """Train until all iterations are done, and save the last adapters.

        Raises:
            UsageError: Options, model or data differ between machines, or no rank can save.
            PmeshError: As for `Mesh.sync`.
        """
        self._state.model.train()
        with self._checkpoints:
            self._begin()
            self._enter()
            while self._state.iteration < self._run.last:
                if (not self._validation_is_due() or self._validate()) and self._step():
                    self._report_and_save()
                self._enter()
            self._end()

    def _begin(self) -> None:
        """Compare the terms of the ranks that begin the job, and load the last checkpoint."""
        resumes = {"--no-resume": "not given" if self._run.resumes else "given"}
        while self._mesh.rank >= 0:  # a newcomer gets the state and the terms in `sync`
            try:
                terms = self._mesh.all_gather_object(resumes | self._state.terms)
            except (RankLost, RosterChanged):
                continue  # with the remaining ranks
            check_alike(self._mesh.names, terms)
            if self._run.resumes:
                self._resume()
            return

    def _resume(self) -> None:
        loaded = self._checkpoints.load()
        if loaded is None:
            return
        folder = self._run.folder / CHECKPOINTS
        self._state.resume(loaded.state, folder)
        self._mesh.load_error_feedback_state(loaded.own or {})
        print(
            f"Resuming after iteration {self._state.iteration} of {self._run.last}, from {folder}; "
            "--no-resume begins anew",
            flush=True,
        )
        if not are_finite(self._state.adapters()):
            print(f"[WARNING] The weights in {folder} {_NOT_FINITE}", flush=True)

    def _enter(self) -> None:
        """Synchronize the state with all other ranks; machines enter here."""
        tree = self._state.tree()
        synced = self._mesh.sync(tree)
        mesh = self._mesh
        if synced is not tree:
            names = (mesh.names[0], mesh.names[mesh.rank])
            check_alike(names, [synced["terms"], self._state.terms])
            self._state.take(synced)
            self._since = _Since()
        if mesh.names != self._names:
            self._names = mesh.names
            ranks = "1 rank" if mesh.size == 1 else f"{mesh.size} ranks"
            print(
                f"Iter {self._state.iteration}: {ranks}, {', '.join(mesh.names)}; "
                f"this is rank {mesh.rank}",
                flush=True,
            )

    def _step(self) -> bool:
        """Take one step. Return False if a rank was lost: its rows are missing."""
        mesh, run, state = self._mesh, self._run, self._state
        began, size = time.perf_counter(), mesh.size
        iterations = range(state.iteration, state.iteration + run.updates_after)
        shares = [run.train.share(i, mesh.share) for i in iterations]
        seeds = [seed_of(run.seed, i, mesh.rank) for i in iterations]
        targets = sum(share.targets for share in shares if share is not None)
        self._warn_of_truncation(sum(share.truncated for share in shares if share is not None))
        loss, grads = self._gradients.of(shares, seeds)
        grads = mesh.average_gradients(
            grads, weight=max(targets, _NO_WEIGHT), compression=run.compression
        )
        if mesh.size != size:
            return False
        parameters, state.optimizer.state = self._update(
            state.model.trainable_parameters(), state.optimizer.state, grads
        )
        state.model.update(parameters)
        del parameters, grads  # else the evaluation could not free their memory
        evaluate_in_groups(state.model.trainable_parameters(), state.optimizer.state)
        clear_cache(run.args.clear_cache_threshold)
        state.iteration += len(iterations)
        self._since.loss += loss
        self._since.targets += targets
        self._since.iterations += len(iterations)
        self._since.seconds += time.perf_counter() - began
        if targets:
            mesh.report(loss=loss / targets)
        return True

    def _validation_is_due(self) -> bool:
        done, next_ = self._state.iteration, self._after_next()
        every = self._run.args.steps_per_eval
        due = done == 0 or next_ == self._run.last or next_ // every > done // every
        wanted = self._run.valid is not None and self._run.args.val_batches != 0
        return wanted and due and self._state.validated < next_

    def _after_next(self) -> int:
        """Return the last iteration of the next step, counted from 1 as in mlx-lm."""
        return self._state.iteration + self._run.updates_after

    def _validate(self) -> bool:
        """Report the mean validation loss. Return False if a rank was lost meanwhile."""
        began = time.perf_counter()
        assert self._run.valid is not None  # noqa: S101 - else no validation is due
        model, count = self._state.model, self._run.args.val_batches
        loss = evaluate(self._mesh, model, self._run.loss, self._run.valid, count)
        model.train()
        if loss is None:
            return False
        iteration = 1 if self._state.iteration == 0 else self._after_next()
        self._state.validated = self._after_next()
        took_s = time.perf_counter() - began
        self._mesh.report(val_loss=loss)
        self._say(f"Iter {iteration}: Val loss {loss:.3f}, Val took {took_s:.3f}s")
        self._call_back(
            "on_val_loss_report", iteration=iteration - 1, val_loss=loss, val_time=took_s
        )
        return True

    def _report_and_save(self) -> None:
        run, done = self._run, self._state.iteration
        before = done - run.updates_after
        if (
            done == run.last
            or done // run.args.steps_per_report > before // run.args.steps_per_report
        ):
            self._report()
        if self._is_saved_now():
            failed = self._save_adapters(numbered=True)
            self._save_state()
            if failed is None:
                self._say(f"Iter {done}: Saved adapter weights to {run.folder}")

    def _is_saved_now(self) -> bool:
        """Return True if the step that has just ended must be saved; all ranks decide alike."""
        every, done = self._run.args.steps_per_save, self._state.iteration
        return bool(done // every > (done - self._run.updates_after) // every)

    def _save_adapters(self, *, numbered: bool) -> UsageError | None:
        """Write the adapters on this machine. If that fails, warn and return the error."""
        try:
            self._state.save_adapters(self._run.folder, numbered=numbered)
        except UsageError as e:
            print(f"[WARNING] Iter {self._state.iteration}: {e}", flush=True)
            return e
        return None

    def _save_state(self) -> None:
        if not are_finite(self._state.adapters()):
            self._say(f"[WARNING] Iter {self._state.iteration}: the weights {_NOT_FINITE}")
        own = self._mesh.error_feedback_state() or None
        self._checkpoints.save(self._state.tree(), self._state.iteration, own=own)

    def _report(self) -> None:
        """Report the mean loss of all present ranks since the last report."""
        since, self._since = self._since, _Since()
        loss, tokens = self._mesh.all_reduce(np.array([since.loss, since.targets], np.float64))
        self._state.trained_tokens += int(tokens)
        seconds = since.seconds or math.inf  # a newcomer's first step may have been discarded
        info = {
            "iteration": self._state.iteration,
            "train_loss": float(loss / max(tokens, 1)),
            "learning_rate": float(self._state.optimizer.learning_rate.item()),
            "iterations_per_second": since.iterations / seconds,
            "tokens_per_second": float(tokens) / seconds,
            "trained_tokens": self._state.trained_tokens,
            "peak_memory": mx.get_peak_memory() / 1e9,
        }
        self._say(
            "Iter {iteration}: Train loss {train_loss:.3f}, Learning Rate {learning_rate:.3e}, "
            "It/sec {iterations_per_second:.3f}, Tokens/sec {tokens_per_second:.3f}, "
            "Trained Tokens {trained_tokens}, Peak mem {peak_memory:.3f} GB".format(**info)
        )
        self._call_back("on_train_loss_report", **info)

    def _end(self) -> None:
        """Save the last adapters on each rank. Raise the error if no rank could."""
        failed = self._save_adapters(numbered=False)
        if failed is None:
            self._say(f"Saved final weights to {self._run.folder}")
        if not self._mesh.all_reduce(np.array(failed is None), op="max") and failed is not None:
            raise failed
        if not self._is_saved_now():
            self._save_state()
        where = "not on this machine" if failed else f"in {self._run.folder}"
        print(
            f"Trained {self._state.iteration} iterations; this was rank {self._mesh.rank} of "
            f"{self._mesh.size}. The adapters are {where}, weights "
            f"{digest(self._state.adapters())}",
            flush=True,
        )

    def _leads(self) -> bool:
        return self._mesh.rank == 0

    def _say(self, line: str) -> None:
        if self._leads():
            print(line, flush=True)

    def _call_back(self, name: str, **info: object) -> None:
        if self._run.callback is not None:
            getattr(self._run.callback, name)(info)

    def _warn_of_truncation(self, rows: int) -> None:
        if rows and not self._truncated:
            self._truncated = True
            length = self._run.args.max_seq_length
            print(
                f"[WARNING] Some rows have more than {length} tokens and are cut there: split "
                "them, or give a longer --max-seq-length",
                flush=True,
            )


def evaluate(
    mesh: Mesh,
    model: Any,
    loss: Loss,
    batches: Batches,
    count: int,
) -> float | None:
    """Return the mean loss over the first batches; None if a rank was lost.

    Args:
        mesh: The mesh; each rank takes its share of each batch.
        model: The model, which stays in evaluation mode.
        loss: The loss, as in training.
        batches: The data set.
        count: The number of batches; -1 for all.
    """
    model.eval()
    size, sums = mesh.size, np.zeros(2)
    for number in range(len(batches) if count < 0 else min(count, len(batches))):
        share = batches.share(number, mesh.share)
        if share is not None:
            sums += loss_of(model, loss, share), share.targets
    total, targets = mesh.all_reduce(sums)
    return float(total / max(targets, 1)) if mesh.size == size else None


def digest(adapters: Mapping[str, Any]) -> str:
    """Return a hash of the trained weights. It is the same on all machines."""
    hasher = xxhash.xxh3_64()
    for name, x in sorted(adapters.items()):
        hasher.update(f"{name} {x.shape} {x.dtype}".encode())
        hasher.update(np.array(x.reshape(-1).view(mx.uint8)).tobytes())
    return hasher.hexdigest()


def are_finite(adapters: Mapping[str, Any]) -> bool:
    """Return False if a trained weight is infinite or NaN."""
    return all(mx.isfinite(x).all().item() for x in adapters.values())


def seed_of(seed: int, iteration: int, rank: int) -> int:
    """Return the seed for a rank's random numbers in an iteration, on any machine."""
    return int(np.random.SeedSequence([seed, iteration, rank]).generate_state(1, np.uint64)[0])
