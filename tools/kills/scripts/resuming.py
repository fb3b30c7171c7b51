"""Scripts that train as under torchrun, and go on from their last checkpoint when started again.

    resuming.py LIBRARY FOLDER [STEPS [PAUSE_S]]

None of them knows pmesh, but for Lightning's `strategy="pmesh"`. FOLDER is one for all machines. If
it has a file `kill`, rank 1 kills itself once in the middle of the training.
"""

import os
import signal
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

KILLED_AT = 7
ROWS, SAVE_EVERY = 20, 3


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the command line says."""

    folder: Path
    steps: int
    pause_s: float
    """Before each step, which else takes some milliseconds."""

    def begin_step(self, step: int) -> None:
        """Print the number, counted from 0."""
        print(f"step {step}", flush=True)
        kill = self.folder / "kill"
        if os.environ["RANK"] == "1" and step == KILLED_AT and kill.exists():
            kill.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.pause_s)

    def end(self, steps: int, net: torch.nn.Module) -> None:
        """Save what this rank has in the end."""
        rank = os.environ["RANK"]
        x, labels = rows()
        with torch.no_grad():
            loss = cross_entropy(net(x), labels).item()
        found = {"steps": steps, "net": net.state_dict(), "loss": loss}
        torch.save(found, self.folder / f"rank-{rank}.pt")
        print(f"rank {rank} ends with loss {loss:.6f}", flush=True)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    pixels, digits = load_digits(return_X_y=True)
    return torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)


def digits_net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))


def plain(order: Arguments) -> None:
    """Train by torch's own DDP over gloo, as one writes it for torchrun."""
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    net = digits_net()
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    data = TensorDataset(*(each[:500] for each in rows()))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, ROWS, sampler=sampler)
    saved, first = order.folder / "last.pt", 0
    if saved.exists():
        last: dict[str, Any] = torch.load(saved)
        net.load_state_dict(last["net"])
        optimizer.load_state_dict(last["optimizer"])
        first = last["step"]
    step = 0
    while step < order.steps:
        sampler.set_epoch(step // len(loader))
        for x, labels in loader:
            if first <= step < order.steps:
                order.begin_step(step)
                optimizer.zero_grad()
                cross_entropy(ddp(x), labels).backward()
                optimizer.step()
                if dist.get_rank() == 0 and (step + 1) % SAVE_EVERY == 0:
                    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                    written = saved.with_suffix(".new")
                    torch.save(state | {"step": step + 1}, written)
                    written.replace(saved)
            step += 1
    order.end(order.steps, net)
    dist.destroy_process_group()


def transformers(order: Arguments) -> None:
    from transformers import (
        PreTrainedConfig,
        PreTrainedModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class PreTrainedDigits(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.net = digits_net()
            self.post_init()

        def _init_weights(self, module: torch.nn.Module) -> None:
            pass

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = self.net(x)
            return {"loss": cross_entropy(outputs, labels), "logits": outputs}

    class OnStepBegin(TrainerCallback):
        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            order.begin_step(state.global_step)

    arguments = TrainingArguments(
        str(order.folder / "checkpoints"),
        max_steps=order.steps,
        per_device_train_batch_size=ROWS,
        learning_rate=1e-2,
        logging_steps=order.steps,
        save_steps=SAVE_EVERY,
        report_to=[],
        disable_tqdm=True,
    )
    model = PreTrainedDigits(PreTrainedConfig())
    data = [{"x": x, "labels": label} for x, label in zip(*rows(), strict=True)][:500]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[OnStepBegin()])
    # `get_last_checkpoint` also returns one that rank 0 was killed while it wrote.
    whole = Path(arguments.output_dir).glob("checkpoint-*/trainer_state.json")
    last = max(whole, key=lambda file: int(file.parent.name.split("-")[1]), default=None)
    trainer.train(resume_from_checkpoint=str(last.parent) if last else None)
    order.end(trainer.state.global_step, model.net)


def lightning(order: Arguments) -> None:
    from lightning import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class LightningDigits(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = digits_net()

        def training_step(self, batch: Any) -> torch.Tensor:
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    class OnBatchStart(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            order.begin_step(trainer.global_step)

    per_epoch = 4
    data = [each[: per_epoch * 3 * ROWS] for each in rows()]  # of three ranks
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), ROWS, shuffle=True)
    trainer = Trainer(
        strategy="pmesh",
        accelerator="cpu",
        max_epochs=order.steps // per_epoch,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(order.folder, save_last=True), OnBatchStart()],
    )
    model = LightningDigits()
    trainer.fit(model, loader, ckpt_path="last")
    order.end(trainer.global_step, model.net)


LIBRARIES = {"torch": plain, "transformers": transformers, "lightning": lightning}


def main(library: str, folder: str, steps: str = "12", pause_s: str = "0") -> None:
    LIBRARIES[library](Arguments(Path(folder), int(steps), float(pause_s)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
