"""What a rank of `tools.kills` does: a fork of a process that has imported torch already."""

import hashlib
import json
import os
import re
import sys
import time
from typing import Any

import torch
import torch._dynamo  # what DDP imports when it is constructed: here once for all ranks
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import pmesh.torch

RANKS, RATE = 3, 0.02
BATCH = 400
"""Per rank. With 40 the order of the samples alone changes the loss at the end by more than 1 %."""


def main() -> None:
    """Train as the command line says, and print a line of JSON for each step and each end."""
    kind, *numbers = sys.argv[1:]
    torch.set_num_threads(1)
    if kind == "elastic":
        train_elastic(steps=int(numbers[0]))
    elif kind == "elastic-trainer":
        train_by_trainer(steps=int(numbers[0]))
    else:
        train_fixed(sharded=kind == "fsdp")


def tell(**facts: object) -> None:
    print(json.dumps(facts | {"at": time.monotonic()}), flush=True)


def net() -> nn.Sequential:
    layers = [nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10)]
    return nn.Sequential(*layers)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    return images.float() / 16, labels


def digest_of(model: nn.Module) -> str:
    hashed = hashlib.sha256()
    for each in model.state_dict().values():
        hashed.update(each.numpy().tobytes())
    return hashed.hexdigest()[:16]


def train_elastic(*, steps: int) -> None:
    """Train digits for so many steps, whoever is there."""
    images, labels = digits()
    mesh = pmesh.torch.init(elastic=True)
    torch.manual_seed(1 + mesh.rank)  # every training begins with the same weights, of its rank 0
    model = pmesh.torch.DistributedDataParallel(net(), bucket_cap_mb=0.003)
    optimizer = torch.optim.Adam(model.parameters(), RATE, weight_decay=1e-2)
    # Steps beyond these, while a killed one is away, change nothing.
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    while mesh.step < steps or mesh.size < RANKS:  # one that was killed late comes back, too
        pmesh.torch.sync(model, optimizer, schedule)
        # All ranks together take the same rows, however many ranks there are.
        mine = mesh.shard(len(images), epoch=mesh.step)[: RANKS * BATCH // mesh.size]
        optimizer.zero_grad()
        cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        schedule.step()
        tell(step=mesh.step, size=mesh.size, rank=mesh.rank, digest=digest_of(model))
    with torch.no_grad():
        tell(loss=cross_entropy(model(images), labels).item())
    mesh.close()


class NetWithLoss(nn.Module):
    """The net as Transformers' Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": cross_entropy(self.net(pixels), labels)}


def train_by_trainer(*, steps: int) -> None:
    """The same by Transformers' Trainer, with two batches for each step, and clipping."""
    from transformers import TrainerCallback, TrainingArguments

    class WaitsForAll(pmesh.torch.ElasticTrainer):
        def _sync(self) -> None:
            super()._sync()
            while mesh.size < RANKS and self.state.global_step >= steps:
                super()._sync()  # one that was killed late comes back, too

    class StepReporter(TrainerCallback):
        def on_step_end(self, *given: Any, **_: object) -> None:
            step = given[1].global_step
            tell(step=step, size=mesh.size, rank=mesh.rank, digest=digest_of(model))

    images, labels = digits()
    mesh = pmesh.torch.init(elastic=True)
    torch.manual_seed(1)
    model = NetWithLoss()
    arguments = TrainingArguments(
        os.environ["PMESH_HOME"],
        max_steps=steps,
        per_device_train_batch_size=BATCH // 2,
        gradient_accumulation_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=True,
    )
    optimizer = torch.optim.Adam(model.parameters(), RATE, weight_decay=1e-2)
    rows = [{"pixels": x, "labels": y} for x, y in zip(images, labels, strict=True)]
    optimizers = optimizer, None  # the Trainer makes the schedule
    training = WaitsForAll(
        model, arguments, train_dataset=rows, callbacks=[StepReporter()], optimizers=optimizers
    )
    training.train()
    model.eval()
    with torch.no_grad():
        tell(loss=model(images, labels)["loss"].item())
    mesh.close()


def train_fixed(*, sharded: bool) -> None:
    """Train until a rank is lost, with torch's own DDP or FSDP2; then call once more."""
    images, labels = digits()
    dist.init_process_group("pmesh")
    rank, size = dist.get_rank(), dist.get_world_size()
    model: Any = net()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in model[::2]:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.003)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    step = 0
    try:
        while True:
            step += 1
            mine = slice((step * size + rank) * BATCH % 1600, None)
            optimizer.zero_grad()
            cross_entropy(model(images[mine][:BATCH]), labels[mine][:BATCH]).backward()
            optimizer.step()
            tell(step=step, rank=rank)
    except RuntimeError as e:  # of the backward pass, in which torch makes it one; or below it
        tell(error=_message(e))
    try:
        dist.all_reduce(torch.ones(1))
    except dist.DistBackendError as e:
        tell(again=_message(e))


def _message(error: RuntimeError) -> str:
    """The line with the message of pmesh: torch puts its own lines around it in C++."""
    found = re.search(r"\w+: (rank|op) \d.*", str(error))
    return found[0] if found else repr(error)
