"""Transformers' Trainer for ranks that come and go: `pmesh.torch.ElasticTrainer`.

The loop of the Trainer sees one process, and one batch for each optimizer step: this rank's share
of the batch of all ranks. Where the training is, is not a matter of that loop, but of
`state.global_step`, which all ranks get from `pmesh.torch.sync` at the top of each step. So a rank
that enters, or was cut off, goes on where the others are. Only public names of Transformers are
overridden (5.24).
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from copy import copy
from importlib import import_module
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from pmesh.client.trees.state import pack
from pmesh.errors import UsageError
from pmesh.torch.data_parallel import DistributedDataParallel
from pmesh.torch.elastic import current, init, sync
from pmesh.torch.library import Tensor, dist, torch
from pmesh.torch.ranks import WORLDS
from pmesh.torch.steps import Steps
from pmesh.torch.transformers import check_same, extend

transformers: Any = import_module("transformers")
extend(import_module("transformers.trainer"))

_REFUSED: Mapping[str, tuple[object, str]] = MappingProxyType(
    {
        "auto_find_batch_size": (False, "it starts the training of one rank again"),
        "dataloader_num_workers": (
            0,
            "workers load batches before it is known which ranks there are",
        ),
        "deepspeed": (None, "it needs a fixed number of ranks"),
        "fp16": (False, "its loss has a scale of its own on each rank; use bf16"),
        "fsdp": (None, "it needs a fixed number of ranks"),
        "include_num_input_tokens_seen": ("no", "a rank knows its own tokens only"),
        "load_best_model_at_end": (False, "only the rank that saved the best model has it"),
        "parallelism_config": (None, "it needs a fixed number of ranks"),
        "train_sampling_strategy": ("random", "the mesh deals the rows, in an order of its own"),
    }
)
"""For each argument that does not fit, the value that does, and why no other."""
_DEALS_ROWS = {"get_train_dataloader", "get_batch_samples", "_get_train_sampler"}
"""What a trainer of others overrides that takes rows in an order of its own."""


class ElasticTrainer(transformers.Trainer):  # type: ignore[misc] # Transformers has no types here
    """A Trainer of which each rank goes on when others are lost, and which ranks can enter.

    Use it as `transformers.Trainer`, on each machine with the same script and arguments. In each
    step, all ranks together take the same number of rows, whichever ranks there are, so the number
    of steps and the schedule do not depend on them. A step's gradient is the mean over these rows,
    or over their tokens where the Trainer counts those. If a rank is lost in a step, it is the mean
    over the rows of the others.

    Each rank evaluates the whole evaluation set, and all take the metrics of rank 0, which is the
    only one that saves. Random generators are seeded anew for each step, on each rank otherwise.

    Before another subclass of `transformers.Trainer` it makes that one elastic, as in `class
    ElasticSFT(ElasticTrainer, trl.SFTTrainer)`, unless that one deals rows by itself.
    """

    def __init__(
        self,
        model: Any = None,  # noqa: ANN401 - as there
        args: Any = None,  # noqa: ANN401 - as there
        *others: Any,  # noqa: ANN401 - as there
        rows: int | None = None,
        **options: Any,  # noqa: ANN401 - as there
    ) -> None:
        """Join the job by `pmesh.torch.init(elastic=True)`, if the program has not.

        Args:
            model: as for `transformers.Trainer`; weights that are not trained are not sent.
            args: as for `transformers.Trainer`.
            others: as for `transformers.Trainer`.
            rows: how many rows all ranks take in a step. Default: those of the arguments,
                `per_device_train_batch_size * gradient_accumulation_steps`, for each of the ranks
                with which the job begins. No rank computes more than
                `per_device_train_batch_size` of them at once.
            options: as for `transformers.Trainer`.

        Raises:
            UsageError: an argument does not fit ranks that come and go.
            PmeshError: as for `pmesh.torch.init`.
        """
        _check_bases(type(self))
        mine = copy(args or transformers.TrainingArguments("tmp_trainer"))
        if not isinstance(mine, transformers.TrainingArguments):
            raise UsageError(f"give the TrainingArguments by name, as args=…; here is {mine!r:.99}")
        _check(mine)
        if dist.is_initialized():
            raise UsageError(
                "Accelerate has begun a process group for the TrainingArguments, whose number of "
                "ranks is fixed: import pmesh.torch.ElasticTrainer above them, and set no backend"
            )
        if WORLDS.elastic is None:
            init(elastic=True)
        self._elastic = current()
        each = mine.per_device_train_batch_size * mine.gradient_accumulation_steps
        self._rows = rows or each * self._elastic.ranks
        self._steps = Steps()
        self._ddp: _Trained | None = None
        # The Trainer's loop shall take one batch a step, and not look for its place by itself.
        mine.gradient_accumulation_steps, mine.ignore_data_skip = 1, True
        mine.is_elastic = True
        mine.distributed_state.process_index = self._elastic.mesh.rank  # Accelerate copies it
        inner: Any = super()
        if others:
            inner.__init__(model, mine, *others, **options)
        else:  # the second argument of some trainers of TRL is another one
            inner.__init__(model, args=mine, **options)
        self.add_callback(_AtSteps(self))

    def train(
        self,
        resume_from_checkpoint: Any = None,  # noqa: ANN401 - as there
        trial: Any = None,  # noqa: ANN401 - as there
        ignore_keys_for_eval: Any = None,  # noqa: ANN401 - as there
    ) -> Any:  # noqa: ANN401 - as there
        """Train as `transformers.Trainer` does.

        A rank that enters goes on where the others are, whatever checkpoint it has.

        Raises:
            UsageError: the ranks with which the job begins would go on from different steps.
            PmeshError: as for `pmesh.torch.sync`.
        """
        if trial is not None:
            raise UsageError("ElasticTrainer searches no hyperparameters: take one of the trials")
        self._steps = Steps(training=self._steps.training + 1)
        inner: Any = super()
        output = inner.train(resume_from_checkpoint, None, ignore_keys_for_eval)
        return output._replace(training_loss=output.metrics["train_loss"])

    def get_train_dataloader(self) -> Any:  # noqa: ANN401 - as there
        """Return a loader whose batches are those of all ranks; the loop takes none from it."""
        if isinstance(self.train_dataset, torch.utils.data.IterableDataset):
            raise UsageError(
                "ElasticTrainer deals rows by their numbers: give a train_dataset with a length "
                "and indices, not an IterableDataset"
            )
        inner: Any = super()
        of_rank = inner.get_train_dataloader()
        self._loader = torch.utils.data.DataLoader(
            of_rank.dataset,
            self._rows,
            collate_fn=of_rank.collate_fn,
            drop_last=self.args.dataloader_drop_last,
        )
        if not len(self._loader):
            raise UsageError(f"the dataset has fewer rows than one step of all ranks, {self._rows}")
        return self._loader

    def get_total_train_batch_size(self, args: object) -> int:
        """Return how many rows all ranks take in a step."""
        del args
        return self._rows

    def set_initial_training_values(self, args: object, dataloader: object) -> Any:  # noqa: ANN401 - as there
        """Let the loop go on for ever: `state.global_step` ends its epochs and the training."""
        inner: Any = super()
        values = inner.set_initial_training_values(args, dataloader)
        self._epochs: int = values[0]
        return sys.maxsize, sys.maxsize, *values[2:]

    def get_batch_samples(
        self, epoch_iterator: Iterator[object], num_batches: int, device: object
    ) -> tuple[list[Any], Any]:
        """Begin a step: let ranks enter, and return this rank's share of its rows as one batch."""
        del epoch_iterator, num_batches
        self._sync()
        step = self.state.global_step
        if step >= self.state.max_steps:  # it has entered behind the others' last step, or followed
            flow = transformers.trainer_callback.DefaultFlowCallback()
            flow.on_step_end(self.args, self.state, self.control)
            return [], None
        mesh, data = self._elastic.mesh, self._loader.dataset
        _seed(self._seed, step, mesh.rank)
        epoch, number = divmod(step, len(self._loader))
        mine = mesh.batch(
            len(data), self._rows, epoch=epoch, position=number * self._rows, seed=self._seed
        ).tolist()
        parts = self._steps.share(mine, self.args.per_device_train_batch_size)
        batches = [self._loader.collate_fn([data[row] for row in part]) for part in parts]
        inner: Any = super()
        _, items = inner.get_batch_samples(iter(batches), len(batches), device)
        return [batches], items

    def training_step(
        self,
        model: object,
        inputs: list[Any],
        num_items_in_batch: Any = None,  # noqa: ANN401 - as there
    ) -> Tensor:
        """Compute the gradients of this rank's rows, and average them over the ranks.

        Returns:
            The mean loss over the rows or tokens of all ranks.
        """
        del model
        ddp, rows = cast("_Trained", self._ddp), sum(self._steps.sizes)
        weight = float(num_items_in_batch) if self._counts(num_items_in_batch) else float(rows)
        ddp.gradient_weight = weight = weight if self._steps.counts else 0.0
        inner: Any = super()
        mine: Any = 0.0
        for i, (batch, size) in enumerate(zip(inputs, self._steps.sizes, strict=True), 1):
            # What the Trainer divides a batch's mean loss by, so that they add up to that of all.
            self.current_gradient_accumulation_steps = rows / size
            with nullcontext() if i == len(inputs) else ddp.no_sync():
                mine = mine + inner.training_step(ddp, batch, num_items_in_batch)
        loss = self._elastic.mesh.average_gradients(np.array([float(mine)]), weight)
        keeps = not self.args.logging_nan_inf_filter or bool(np.isfinite(loss).all())
        self._steps.note(loss.item() if keeps else None)
        return torch.tensor(loss.item(), device=mine.device, dtype=mine.dtype)

    def floating_point_ops(self, inputs: list[Any]) -> int:
        """Return the number of those of this rank's batches."""
        inner: Any = super()
        return sum(inner.floating_point_ops(batch) for batch in inputs)

    def evaluation_loop(self, *inputs: Any, **options: Any) -> Any:  # noqa: ANN401 - as there
        """Evaluate; in a training all ranks take the metrics of rank 0, and so decide alike."""
        inner: Any = super()
        output = inner.evaluation_loop(*inputs, **options)
        if not (self.is_in_train and self._steps.has_begun):
            return output
        metrics = self._elastic.mesh.all_gather_object(output.metrics)[0]
        return output._replace(metrics=metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the loss of all steps, those before this rank has entered, too."""
        self._steps.correct(logs)
        inner: Any = super()
        inner.log(logs, start_time)

    @property
    def _seed(self) -> int:
        """What the order of the rows and the random generators depend on."""
        args: Any = self.args
        return int(args.seed if args.data_seed is None else args.data_seed)

    def _counts(self, items: object) -> bool:
        """Whether the loss of a batch is a sum of items, divided by the number of this rank's."""
        scaled: bool | None = self.loss_is_scaled_for_ga
        if scaled is None:
            accepts = self.model_accepts_loss_kwargs and items is not None
            scaled = bool(accepts or self.compute_loss_func is not None)
        if scaled and items is None:
            raise UsageError(
                "the loss is scaled by the number of items in a batch, and Transformers can't "
                "count these: return a mean, and set loss_is_scaled_for_ga = False"
            )
        return scaled

    def _begin(self) -> None:
        """Before the first sync of a training: make what is synced, and compare."""
        mesh = self._elastic.mesh
        find_unused = self.accelerator.ddp_handler.find_unused_parameters
        self._ddp = _Trained(self.model_wrapped, find_unused_parameters=find_unused)
        self._fixed = {
            "the number of this training in its program": self._steps.training,
            "the rows of a step": self._rows,
            "the steps of an epoch": len(self._loader),
            "the steps in all": self.state.max_steps,
            "the weights that are not trained": self._ddp.digest_of_others(),
        }
        if mesh.rank >= 0 and not mesh.step:  # a newcomer's first op is its first sync
            check_same([f"step {each}" for each in mesh.all_gather_object(self.state.global_step)])

    def _sync(self) -> None:
        """Let ranks enter, and follow the others where this rank has not been with them.

        Raises:
            UsageError: the others train otherwise.
        """
        if not self._steps.has_begun:
            self._begin()
        exported = {name: each.state()["attributes"] for name, each in self._stateful()}
        position: dict[str, Any] = {
            "fixed": dict(self._fixed),
            "step": self.state.global_step,
            "best": [self.state.best_metric, self.state.best_global_step],
            "losses": self._steps.losses,
            "callbacks": exported,
        }
        sync(self._ddp, self.optimizer, self.lr_scheduler, position)
        self._steps.has_begun = True
        for name, value in self._fixed.items():
            if position["fixed"].get(name) != value:
                raise UsageError(
                    f"{name}: {value} on this rank, {position['fixed'].get(name)} in the job; run "
                    "the same script on all machines, with the same arguments and PMESH_WAIT_FOR"
                )
        self.state.global_step = position["step"]
        self.state.best_metric, self.state.best_global_step = position["best"]
        self._steps.losses = position["losses"]
        attributes: dict[str, dict[str, Any]] = position["callbacks"]
        for name, each in self._stateful():
            for attribute, value in attributes.get(name, {}).items():
                setattr(each, attribute, value)
        self.follow()

    def _stateful(self) -> list[tuple[str, Any]]:
        kind = transformers.trainer_callback.ExportableState
        found = [each for each in self.callback_handler.callbacks if isinstance(each, kind)]
        return [(f"{i}.{type(each).__name__}", each) for i, each in enumerate(found)]

    def follow(self) -> None:
        """Take over the rank that this one has now, and the epoch."""
        self.state.epoch = self.state.global_step / len(self._loader)
        rank = self._elastic.mesh.rank
        # Transformers asks both, and its state, who logs and saves.
        self.args.distributed_state.process_index = self.accelerator.state.process_index = rank
        self.state.is_world_process_zero = self.is_world_process_zero()

    def begin_training(self) -> None:
        """Give the state the number of epochs, of which the loop knows nothing."""
        self.state.num_train_epochs = self._epochs

    def end_step(self) -> None:
        """Decide whether the epoch or the training ends; let ranks enter behind the last step."""
        if self.state.global_step >= self.state.max_steps:
            self._sync()
            self.control.should_training_stop = self.state.global_step >= self.state.max_steps
        self.follow()
        if self.state.global_step % len(self._loader) == 0:
            self.control.should_epoch_stop = True
        self.leave_saving()

    def leave_saving(self) -> None:
        """Save nothing on the ranks of which Transformers would save the random generators only."""
        if not self.args.should_save:
            self.control.should_save = False


class _AtSteps(transformers.TrainerCallback):  # type: ignore[misc] # Transformers has no types here
    """Tells the trainer when the loop begins, and when each step and epoch ends."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._trainer.begin_training()

    def on_step_end(self, *_: object, **__: object) -> None:
        self._trainer.end_step()

    def on_epoch_end(self, *_: object, **__: object) -> None:
        self._trainer.leave_saving()


class _Trained(DistributedDataParallel):
    """A model of which `sync` gives newcomers the weights that are trained, and the buffers.

    An adapter's base model is not hashed in each step, nor sent.
    """

    def state_dict(self, *_: object, **__: object) -> dict[str, Tensor]:
        inner: Any = super()
        everything: dict[str, Tensor] = inner.state_dict()
        others = self._others()
        return {name: each for name, each in everything.items() if name not in others}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        inner: Any = super()
        inner.load_state_dict(state, strict=False)

    def digest_of_others(self) -> list[int]:
        """Return a hash of the weights that are not trained, which all ranks must have loaded."""
        inner: Any = super()
        everything: dict[str, Tensor] = inner.state_dict()
        return list(pack({name: everything[name] for name in sorted(self._others())}).digest)

    def _others(self) -> set[str]:
        named = self.named_parameters(remove_duplicate=False)
        return {name for name, parameter in named if not parameter.requires_grad}


def _check_bases(kind: type) -> None:
    """Raise UsageError for a trainer that deals rows by itself, such as TRL's GRPOTrainer."""
    behind = kind.__mro__[kind.__mro__.index(ElasticTrainer) + 1 :]
    for base in behind[: behind.index(transformers.Trainer)]:
        if dealing := _DEALS_ROWS & vars(base).keys():
            raise UsageError(
                f"ElasticTrainer deals the rows itself, and so does {base.__name__}, by "
                f"{min(dealing)}: it can't be elastic; use it alone, with checkpoints"
            )


def _check(args: Any) -> None:  # noqa: ANN401 - of Transformers
    """Raise UsageError for arguments that don't fit ranks that come and go."""
    for name, (fits, why) in _REFUSED.items():
        found = getattr(args, name, fits)
        if found and found != fits:
            raise UsageError(f"ElasticTrainer does not take {name}={found!r}: {why}")
    if args.save_strategy == "best":
        raise UsageError("ElasticTrainer does not take save_strategy='best': 'steps' or 'epoch'")
    if args.n_gpu > 1:
        raise UsageError(
            f"ElasticTrainer computes on one GPU, and this rank sees {args.n_gpu}: set "
            "CUDA_VISIBLE_DEVICES, and start a rank for each"
        )
    if args.accelerator_config.split_batches or args.accelerator_config.dispatch_batches:
        raise UsageError(
            "ElasticTrainer deals the rows itself: leave split_batches and dispatch_batches out"
        )


def _seed(*numbers: int) -> None:
    """Seed all random generators by these numbers: a newcomer's are then what they would be."""
    seed = np.random.SeedSequence(numbers).generate_state(1)
    transformers.set_seed(int(seed[0]))
