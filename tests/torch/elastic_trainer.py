"""`ElasticTrainer` of Transformers, each function a program for every rank."""

import argparse
import os
import signal
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import pmesh.torch
from pmesh.client.mesh import order_of
from pmesh.torch.ranks import WORLDS
from tests.torch.start import fork
from tests.torch.starts import refused

ROWS, EPOCHS = 14, 2  # of 100 rows: the last step of an epoch has 2, for three ranks
STEPS, KILLED_AT, ALL_AGAIN_AT = 40, 8, 20


def import_libraries() -> None:
    """Import what takes seconds."""
    for each in ("accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama"):
        import_module(each)


class DigitsModel(nn.Module):
    """A model whose loss is the mean over the rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)
        self.base = nn.Linear(10, 10).requires_grad_(requires_grad=False)

    def forward(
        self, pixels: torch.Tensor, labels: torch.Tensor, row: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        del row
        logits = self.base(self.last(torch.tanh(self.first(pixels))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def digits(count: int, first: int = 0) -> list[dict[str, torch.Tensor]]:
    pixels, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    named = enumerate(zip(pixels.float() / 16, labels, strict=True))
    rows = [{"pixels": x, "labels": y, "row": torch.tensor(i)} for i, (x, y) in named]
    return rows[first : first + count]


def texts() -> list[dict[str, torch.Tensor]]:
    """Rows of a language model; how many tokens count differs from row to row."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))[: 100 * 16].view(100, 16)
    rows = [{"input_ids": row, "labels": row.clone()} for row in text]
    for i, row in enumerate(rows):
        row["labels"][: i % 16] = -100
    return rows


def language_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, **heads))


def of_kind(kind: str) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    return (DigitsModel(), digits(100)) if kind == "digits" else (language_model(), texts())


def arguments(folder: str, **options: Any) -> Any:
    from transformers import TrainingArguments

    import_module("pmesh.torch.elastic_trainer")  # not for programs of others that are forked here
    chosen = {"learning_rate": 1e-2, "max_grad_norm": 0.5, "logging_steps": 2, "seed": 3}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    return TrainingArguments(folder, **(chosen | quiet | options))


def alone(_: int, folder: str, kind: str, accumulated: str) -> None:
    """Transformers' own Trainer in one process, on the batches of all ranks."""
    from transformers import Trainer

    model, rows = of_kind(kind)
    chosen = arguments(
        folder, num_train_epochs=EPOCHS, gradient_accumulation_steps=int(accumulated)
    )
    kind_of_trainer = in_the_same_order(Trainer, ROWS // int(accumulated))
    training = kind_of_trainer(model, chosen, train_dataset=rows)
    found(training, training.train(), folder, "alone")


def in_the_same_order(base: type, batch: int) -> Any:
    """The trainer of others, which takes rows in the order in which a mesh deals them."""

    class InTheSameOrder(base):
        def get_train_dataloader(self) -> Any:
            count = len(self.train_dataset)
            orders = (order_of(count, epoch=epoch, seed=3).tolist() for epoch in range(EPOCHS))

            class OrderOfEpoch(torch.utils.data.Sampler[int]):
                def __iter__(self) -> Any:
                    return iter(next(orders))

                def __len__(self) -> int:
                    return count

            return torch.utils.data.DataLoader(
                self.train_dataset,
                batch,
                sampler=OrderOfEpoch(),
                collate_fn=self.data_collator,
            )

    return InTheSameOrder


def together(rank: int, folder: str, kind: str, accumulated: str) -> None:
    """The same by three ranks, whose shares are no multiples of what they take at once."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}
    os.environ |= {name: str(value) for name, value in told.items()}  # as 'pmesh run' does
    model, rows = of_kind(kind)
    chosen = arguments(
        folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=4 // int(accumulated),
        gradient_accumulation_steps=int(accumulated),
    )
    if kind == "digits":
        training = pmesh.torch.ElasticTrainer(model, chosen, train_dataset=rows, rows=ROWS)
    else:
        training = behind(with_reference())(model, args=chosen, train_dataset=rows, rows=ROWS)
    found(training, training.train(), folder, str(rank))


def with_reference() -> type:
    """A trainer as TRL's DPOTrainer: its second argument is another one, and it has steps."""
    from transformers import Trainer

    class WithReference(Trainer):
        def __init__(
            self, model: Any = None, reference: Any = None, args: Any = None, **options: Any
        ) -> None:
            assert reference is None
            super().__init__(model, args, **options)

        def training_step(self, *inputs: Any, **options: Any) -> Any:
            return super().training_step(*inputs, **options)

    return WithReference


def behind(base: type) -> Any:
    """The trainer of others, made elastic."""
    return type("Elastic", (pmesh.torch.ElasticTrainer, base), {})


def waiting(base: type, step: int) -> Any:
    """The trainer, which takes this step and the later ones with all three ranks."""

    class Waits(base):
        def _sync(self) -> None:
            super()._sync()
            while self._elastic.mesh.size < 3 and self.state.global_step >= step:
                super()._sync()  # the one that was killed may come back late

    return Waits


def found(training: Any, output: Any, folder: str, name: str) -> None:
    logs = [
        (each["step"], each["loss"], each["grad_norm"], each["learning_rate"])
        for each in training.state.log_history
        if "loss" in each
    ]
    state = training.state
    ends = {"steps": state.global_step, "epoch": state.epoch, "loss": output.training_loss}
    torch.save(
        {"weights": training.model.state_dict(), "logs": logs, **ends}, f"{folder}/{name}.pt"
    )


def comes_back(rank: int, folder: str, kills: str) -> None:
    """Rank 1 is killed in the backward pass of a step, and starts again."""

    def end_of(*, will_die: bool) -> int:
        child = fork(rank, lambda rank: train_digits(rank, Path(folder), will_die=will_die))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    if kills == "killed" and rank == 1:
        assert end_of(will_die=True) == -signal.SIGKILL
    assert end_of(will_die=False) == 0


def train_digits(rank: int, folder: Path, *, will_die: bool) -> None:
    from transformers import EarlyStoppingCallback

    class RecordingTrainer(waiting(pmesh.torch.ElasticTrainer, ALL_AGAIN_AT)):
        def training_step(self, model: Any, inputs: Any, items: Any = None) -> Any:
            step = self.state.global_step
            taken[step] = [int(row) for batch in inputs for row in batch["row"]]
            sizes.add(mesh.size)
            return super().training_step(model, inputs, items)

    taken = dict[int, list[int]]()
    sizes = set[int]()
    torch.manual_seed(0)
    model = DigitsModel()
    out = folder / f"out-{rank}"
    chosen = arguments(
        str(out),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        metric_for_best_model="loss",
        greater_is_better=False,
        save_strategy="steps",
        save_steps=15,
    )
    stopping = EarlyStoppingCallback(early_stopping_patience=1000)
    training = RecordingTrainer(
        model,
        chosen,
        train_dataset=digits(200),
        eval_dataset=digits(100, 1000),
        callbacks=[stopping],
    )
    mesh = WORLDS.elastic.mesh  # type: ignore[union-attr]
    was_late = mesh.rank < 0

    def die(_: torch.Tensor) -> None:
        if training.state.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    if will_die:
        model.first.weight.register_hook(die)
    output = training.train()
    losses = [each["loss"] for each in training.state.log_history if "loss" in each]
    torch.save(
        {
            "weights": training.model.state_dict(),
            "taken": taken,
            "sizes": sizes,
            "late": was_late,
            "rank": mesh.rank,
            "saved": [each.name for each in (out / f"checkpoint-{STEPS}").glob("*.*")],
            "steps": training.state.global_step,
            "epoch": training.state.epoch,
            "last": losses[-1],
            "loss": output.training_loss,
            "best": [training.state.best_metric, training.state.best_global_step],
            "eval": training.evaluate()["eval_loss"],
        },
        folder / f"{rank}.pt",
    )
    mesh.close()


def resumes(rank: int, folder: str) -> None:
    """A job goes on from the checkpoint of another one, which all ranks must have."""

    def trained(checkpoint: str | None, **options: Any) -> Any:
        model, rows = of_kind("digits")
        chosen = arguments(folder, max_steps=6, per_device_train_batch_size=4, **options)
        training = pmesh.torch.ElasticTrainer(model, chosen, train_dataset=rows)
        training.train(resume_from_checkpoint=checkpoint)
        return training

    whole = trained(None, save_strategy="steps", save_steps=4)
    WORLDS.elastic.mesh.barrier()  # type: ignore[union-attr] # rank 0 has saved
    os.environ["PMESH_JOB"] = "resumes again"
    pmesh.torch.init(elastic=True)
    saved = f"{folder}/checkpoint-4"
    with refused(r"different checkpoints \(rank 0: step"):
        trained(saved if rank == 1 else None)
    again = trained(saved)
    assert again.state.global_step == 6
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], value, rtol=1e-5, atol=1e-5)


def imports_late(_: int, folder: str) -> None:
    """Accelerate has begun a fixed number of ranks before the program says that it is elastic."""
    from transformers import TrainingArguments

    fixed = TrainingArguments(folder)
    with refused("import pmesh.torch.ElasticTrainer above them"):
        pmesh.torch.ElasticTrainer(DigitsModel(), fixed, train_dataset=digits(100))


def refuses(_: int, folder: str) -> None:
    """What can't be elastic says so, on each rank, and nothing waits."""
    from transformers import Trainer

    of_others = [
        *({"fp16": True}, {"auto_find_batch_size": True}, {"dataloader_num_workers": 1}),
        *({"train_sampling_strategy": "sequential"}, {"include_num_input_tokens_seen": "all"}),
        {"accelerator_config": {"split_batches": True}},
        {"save_strategy": "best", "metric_for_best_model": "loss"},
        {"save_strategy": "no", "load_best_model_at_end": True},
    ]
    rows = digits(100)
    for options in of_others:
        with refused("ElasticTrainer (does not take|deals the rows itself)"):
            pmesh.torch.ElasticTrainer(DigitsModel(), arguments(folder, **options))

    class InGroups(Trainer):
        def _get_train_sampler(self) -> None:
            """As TRL's GRPOTrainer, which takes each prompt several times."""

    with refused("so does InGroups, by _get_train_sampler"):
        behind(InGroups)(DigitsModel(), args=arguments(folder), train_dataset=rows)
    with refused("give the TrainingArguments by name, as args=…; here is DigitsModel"):
        behind(with_reference())(
            DigitsModel(), DigitsModel(), arguments(folder), train_dataset=rows
        )

    class RowStream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(rows)

    few = arguments(folder, max_steps=1, per_device_train_batch_size=4)
    with refused("not an IterableDataset"):
        pmesh.torch.ElasticTrainer(DigitsModel(), few, train_dataset=RowStream()).train()
    with refused("searches no hyperparameters"):
        pmesh.torch.ElasticTrainer(DigitsModel(), few, train_dataset=rows).train(trial={})
    with refused("this Trainer would train alone"):
        Trainer(DigitsModel(), few, train_dataset=rows).train()
    dropping = arguments(folder, dataloader_drop_last=True)
    with refused("fewer rows than one step of all ranks, 1000"):
        pmesh.torch.ElasticTrainer(DigitsModel(), dropping, train_dataset=rows, rows=1000).train()
    uncounted = pmesh.torch.ElasticTrainer(DigitsModel(), few, train_dataset=rows)
    uncounted.loss_is_scaled_for_ga = True
    with refused("Transformers can't count these"):
        uncounted.train()
    mesh = WORLDS.elastic.mesh  # type: ignore[union-attr]
    other = pmesh.torch.ElasticTrainer(DigitsModel(), few, train_dataset=rows, rows=20 + mesh.rank)
    with refused("the rows of a step: ") if mesh.rank else nullcontext():
        other.train()
