"""Trainings whose batches are dealt by the speed of the ranks, by each library that can."""

import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

import pmesh
import pmesh.torch
from pmesh.client.mesh import order_of
from pmesh.torch.process_group import ProcessGroup

SAMPLES, ROWS, EPOCHS = 1000, 90, 2
SPEEDS = 1, 2, 4


def import_libraries() -> None:
    """Import what takes seconds, as far as it is installed."""
    for each in ("accelerate", "lightning.pytorch", "transformers.trainer"):
        with suppress(ImportError):
            import_module(each)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    found = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    return found[0][:SAMPLES], found[1][:SAMPLES]


def digits_net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def alone() -> dict[str, torch.Tensor]:
    """The weights that one process has after these batches."""
    (x, labels), net = digits(), digits_net()
    optimizer = sgd(net)
    for epoch in range(EPOCHS):
        order = torch.tensor(order_of(SAMPLES, epoch=epoch, seed=0))
        for batch in order.split(ROWS):
            optimizer.zero_grad()
            cross_entropy(net(x[batch]), labels[batch]).backward()
            optimizer.step()
    weights: dict[str, torch.Tensor] = net.state_dict()
    return weights


class ComputeClock:
    """How long a rank computes: its rows by its speed, whatever else this machine does."""

    def __init__(self, rank: int) -> None:
        self.seconds, self.rows = 0.0, list[int]()
        self._speed = SPEEDS[rank]
        setattr(ProcessGroup, "computed_s", property(lambda _: self.seconds))  # noqa: B010 - typed

    def scale(self, sampler: pmesh.torch.DistributedBatchSampler, rows: int) -> float:
        """Begin a step of so many rows, which this rank computes at once."""
        scale = sampler.begin_step(rows)
        self.seconds += rows / self._speed
        self.rows.append(rows)
        return scale


def _start(rank: int, folder: str) -> ComputeClock:
    told: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 3,
        "LOCAL_WORLD_SIZE": 3,
    }
    told |= {"PMESH_PLACE": rank, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "a", "MASTER_PORT": 1}
    os.environ |= {name: str(value) for name, value in told.items()}
    os.environ |= {"PMESH_JOB": Path(folder).name, "MASTER_ADDR": "127.0.0.1"}
    return ComputeClock(rank)


def _end(rank: int, folder: str, net: torch.nn.Module, clock: ComputeClock) -> None:
    torch.save({"net": net.state_dict(), "rows": clock.rows}, f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()


def _loader(data: Dataset[Any], **options: Any) -> tuple[Any, DataLoader[Any]]:
    sampler = pmesh.torch.DistributedBatchSampler(data, ROWS)
    return sampler, DataLoader(data, batch_sampler=sampler, **options)


def plain(rank: int, folder: str) -> None:
    """A loop with torch's own DDP; the ranks' data loaders are not equally far ahead."""
    clock = _start(rank, folder)
    dist.init_process_group("pmesh")
    net = digits_net()
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = sgd(net)
    sampler, loader = _loader(TensorDataset(*digits()), num_workers=int(rank == 1))
    for _ in range(EPOCHS):
        for x, labels in loader:
            optimizer.zero_grad()
            (cross_entropy(ddp(x), labels) * clock.scale(sampler, len(x))).backward()
            optimizer.step()
    _end(rank, folder, net, clock)


def accelerate(rank: int, folder: str) -> None:
    """A loop over Accelerate, which prepares model and optimizer, and not the data loader."""
    clock = _start(rank, folder)
    from accelerate import Accelerator

    accelerator = Accelerator()
    net = digits_net()
    ddp, optimizer = accelerator.prepare(net, sgd(net))
    sampler, loader = _loader(TensorDataset(*digits()))
    for _ in range(EPOCHS):
        for x, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(ddp(x), labels) * clock.scale(sampler, len(x)))
            optimizer.step()
    _end(rank, folder, net, clock)


def accelerate_twice(rank: int, folder: str) -> None:
    """Accelerate prepares the data loader, too."""
    _start(rank, folder)
    from accelerate import Accelerator

    accelerator = Accelerator()
    _, loader = _loader(TensorDataset(*digits()))
    with pytest.raises(pmesh.UsageError, match=r"out of accelerator\.prepare"):
        accelerator.prepare(loader)


def lightning(rank: int, folder: str, **options: Any) -> None:
    clock = _start(rank, folder)
    from lightning import LightningModule, Trainer

    class ScaledDigits(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = digits_net()

        def train_dataloader(self) -> DataLoader[Any]:
            self.sampler, loader = _loader(TensorDataset(*digits()))
            return loader

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            return loss * clock.scale(self.sampler, len(batch[0]))

        def configure_optimizers(self) -> Any:
            return sgd(self)

    options = {"use_distributed_sampler": False} | options
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options |= {"enable_checkpointing": False, "default_root_dir": folder, "accelerator": "cpu"}
    trainer = Trainer(strategy="pmesh", max_epochs=EPOCHS, **options)
    module = ScaledDigits()
    trainer.fit(module)
    _end(rank, folder, module.net, clock)


def lightning_twice(rank: int, folder: str) -> None:
    """Lightning puts a sampler of its own into the data loader, as it does unless told not to."""
    with pytest.raises(pmesh.UsageError, match="use_distributed_sampler=False"):
        lightning(rank, folder, use_distributed_sampler=True)


def transformers(rank: int, folder: str) -> None:
    """Transformers' Trainer, of which two public methods are overridden."""
    clock = _start(rank, folder)
    trainer = _trainer(folder, clock, num_train_epochs=EPOCHS, save_strategy="no")
    trainer.train()
    _end(rank, folder, trainer.model.net, clock)


def resumed(rank: int, folder: str) -> None:
    """The same, which ends in the middle of the second epoch, and goes on from its checkpoint."""
    clock = _start(rank, folder)
    _trainer(folder, clock, max_steps=15, save_steps=15).train()
    dist.barrier()  # rank 0 has written it
    trainer = _trainer(folder, clock, num_train_epochs=EPOCHS, save_strategy="no")
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-15")
    _end(rank, folder, trainer.model.net, clock)


def _trainer(folder: str, clock: ComputeClock, **options: Any) -> Any:
    from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    class DigitsWithLoss(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.net = digits_net()
            self.post_init()

        def _init_weights(self, module: torch.nn.Module) -> None:
            pass

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": cross_entropy(self.net(x), labels)}

    class ByShares(Trainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            self.sampler, loader = _loader(self.train_dataset, collate_fn=self.data_collator)
            return loader

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **named)
            return loss * clock.scale(self.sampler, len(inputs["labels"]))

    data = [{"x": x, "labels": label} for x, label in zip(*digits(), strict=True)]
    arguments = TrainingArguments(
        folder, max_grad_norm=0.0, report_to=[], disable_tqdm=True, **options
    )
    model = DigitsWithLoss(PreTrainedConfig())
    optimizer = sgd(model)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return ByShares(model, arguments, train_dataset=data, optimizers=(optimizer, constant))
