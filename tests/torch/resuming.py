"""Scripts that train as under torchrun, and go on from their last checkpoint when started again.

    resuming.py LIBRARY FOLDER

Rank 1 kills itself in the middle of the training, unless FOLDER has a file `killed`.
"""

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits

KILLED_AT = 7


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    pixels, digits = load_digits(return_X_y=True)
    return torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))


def die_at(step: int, folder: Path) -> None:
    marker = folder / "killed"
    if os.environ["RANK"] == "1" and step == KILLED_AT and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def transformers(folder: Path) -> None:
    from transformers import (
        PreTrainedConfig,
        PreTrainedModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
    from transformers.trainer_utils import get_last_checkpoint

    class Digits(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.net = net()
            self.post_init()

        def _init_weights(self, module: torch.nn.Module) -> None:
            pass

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = self.net(x)
            return {"loss": torch.nn.functional.cross_entropy(outputs, labels), "logits": outputs}

    class Dies(TrainerCallback):
        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            die_at(state.global_step, folder)

    saved = str(folder / "checkpoints")  # a folder that all machines share
    arguments = TrainingArguments(
        saved,
        max_steps=12,
        per_device_train_batch_size=20,
        learning_rate=1e-2,
        logging_steps=12,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
    )
    model = Digits(PreTrainedConfig())
    data = [{"x": x, "labels": label} for x, label in zip(*rows(), strict=True)][:500]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Dies()])
    last = get_last_checkpoint(saved) if Path(saved).exists() else None
    trainer.train(resume_from_checkpoint=last)
    save(folder, trainer.state.global_step, model.net)


def lightning(folder: Path) -> None:
    from lightning import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Digits(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    class Dies(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            die_at(trainer.global_step, folder)

    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*(each[:300] for each in rows())), 20, shuffle=True
    )
    trainer = Trainer(
        strategy="pmesh",
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(folder, save_last=True), Dies()],
    )
    model = Digits()
    trainer.fit(model, loader, ckpt_path="last")
    save(folder, trainer.global_step, model.net)


def save(folder: Path, steps: int, net: torch.nn.Module) -> None:
    rank = os.environ["RANK"]
    x, labels = rows()
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(net(x), labels).item()
    found = {"steps": steps, "net": net.state_dict(), "loss": loss}
    torch.save(found, folder / f"rank-{rank}.pt")
    print(f"rank {rank} ends with loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"transformers": transformers, "lightning": lightning}[sys.argv[1]](Path(sys.argv[2]))
