"""Lightning's Trainer and Fabric as each of several ranks."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.accelerators import MPSAccelerator as OfFabric
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import pmesh.torch
from pmesh.torch.backends import answer_for_others
from pmesh.torch.lightning import callbacks
from tests.torch.gloo import begin_gloo
from tests.torch.reported import reported

RANKS = 3


def _start(rank: int, folder: str, way: str) -> dict[str, Any]:
    """Set what the launcher sets; return how the script names its strategy."""
    if way != "by_hand":
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
        os.environ |= {name: str(value) for name, value in told.items()}
        os.environ |= {"TORCHELASTIC_RUN_ID": "a", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"PMESH_JOB": Path(folder).name, "MASTER_PORT": "1"}
    if way == "gloo":
        del os.environ["PMESH_WAIT_FOR"]
        begin_gloo(folder, rank, RANKS)
    elif way != "by_hand":
        os.environ["PMESH_PLACE"] = str(rank)
    if way == "answered":
        answer_for_others()
    if way in {"gloo", "answered"}:
        return {"strategy": "ddp", "devices": RANKS}
    return {"strategy": "pmesh"}


def _end(folder: str, found: dict[str, Any], way: str) -> None:
    assert dist.get_backend() == ("gloo" if way == "gloo" else "pmesh")
    torch.save(found, f"{folder}/rank-{dist.get_rank()}.pt")
    dist.destroy_process_group()


def _rows(first: int, last: int) -> torch.utils.data.Dataset[tuple[torch.Tensor, ...]]:
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    return torch.utils.data.TensorDataset(x[first:last], y[first:last])


def _loaders() -> list[Any]:
    rows = _rows(0, 700), _rows(700, 1000)
    return [
        torch.utils.data.DataLoader(part, batch_size=25, shuffle=part is rows[0]) for part in rows
    ]


def _net() -> torch.nn.Module:
    first = torch.nn.Linear(64, 32, bias=False)  # BatchNorm makes the gradient of a bias mere noise
    layers = torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    return torch.nn.Sequential(first, *layers)


class ValidatedDigits(lightning.LightningModule):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.rate = rate
        self.net = _net()
        self.losses: list[float] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any) -> None:
        outputs = self.net(batch[0])
        right = (outputs.argmax(1) == batch[1]).float().mean()
        self.log("right", right, sync_dist=True)
        self.log("test_loss", cross_entropy(outputs, batch[1]), sync_dist=True)
        everyone = self.all_gather(outputs.sum())
        assert everyone.numel() == self.trainer.world_size
        self.log("gathered", everyone.sum())

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def module() -> ValidatedDigits:
    return ValidatedDigits(rate=1e-2)


def settings(folder: str) -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 1.0,
        "log_every_n_steps": 1,
        "callbacks": [ModelCheckpoint(monitor="test_loss", save_last=True)],
    }


def trainer(rank: int, folder: str, way: str) -> None:
    """Two epochs, the third from the last checkpoint by a new Trainer, and a test of the best."""
    chosen = _start(rank, folder, way)
    lightning.seed_everything(0, verbose=False)
    first = lightning.Trainer(max_epochs=2, **chosen, **settings(folder))
    model = module()
    first.fit(model, *_loaders())
    last = first.checkpoint_callback.last_model_path
    again = lightning.Trainer(max_epochs=3, **chosen, **settings(folder))
    resumed = module()
    again.fit(resumed, *_loaders(), ckpt_path=last)
    if way != "gloo":
        dist.barrier()
        losses = [reports["loss"] for reports in reported(Path(folder).name)]
        assert resumed.losses[-1] in losses
        assert len(losses) == RANKS
        dist.barrier()
    tested = again.test(resumed, _loaders()[1], ckpt_path="best", verbose=False)
    assert (again.global_rank, again.world_size) == (dist.get_rank(), RANKS)
    assert again.is_global_zero == (dist.get_rank() == 0)
    assert again.local_rank == dist.get_rank()  # all are on one machine
    state = torch.load(last, weights_only=True)
    assert state["hyper_parameters"] == {"rate": 1e-2}
    found = {
        "net": resumed.net.state_dict(),
        "losses": model.losses + resumed.losses,
        "metrics": {name: value.item() for name, value in again.callback_metrics.items()},
        "tested": tested,
        "saved": sorted(each.name for each in Path(folder).rglob("*.ckpt")),
        "csv": sorted(each.name for each in Path(folder).rglob("metrics.csv")),
    }
    _end(folder, found, way)


def fabric(rank: int, folder: str, way: str) -> None:
    """A loop of Fabric's."""
    chosen = _start(rank, folder, way)
    lightning.seed_everything(0, verbose=False)
    fabric = lightning.Fabric(accelerator="cpu", **chosen)
    fabric.launch()
    net = _net()
    net, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    train, test = fabric.setup_dataloaders(*_loaders())
    losses = []
    for i, (images, labels) in enumerate(train):
        with fabric.no_backward_sync(net, enabled=i % 2 == 0):
            loss = cross_entropy(net(images), labels)
            fabric.backward(loss)
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
    net.eval()
    right = [(net(images).argmax(1) == labels).sum() for images, labels in test]
    rank, size = fabric.global_rank, fabric.world_size
    assert (rank, size) == (dist.get_rank(), RANKS)
    assert fabric.is_global_zero == (rank == 0)
    fabric.save(f"{folder}/state.pt", {"net": net, "optimizer": optimizer})
    other = _net()
    fabric.load(f"{folder}/state.pt", {"net": other})
    for mine, saved in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, saved)
    found = {
        "net": {name: value.detach() for name, value in net.named_parameters()},
        "losses": losses,
        "right": fabric.all_gather(torch.stack(right)),
        "said": fabric.broadcast({"by": rank, "x": [torch.ones(2) * rank]}, src=1),
        "path": fabric.broadcast(Path(f"of-{rank}"), src=2) == Path("of-2"),
    }
    fabric.barrier()
    _end(folder, found, way)


class Point(NamedTuple):
    x: int


def refusals(rank: int, folder: str) -> None:
    """What can't be has one sentence, on each rank."""
    chosen = _start(rank, folder, "launched")
    fabric = lightning.Fabric(accelerator="cpu", **chosen)
    fabric.launch()
    with pytest.raises(pmesh.UsageError, match=r"not a Point: .*add_safe_globals"):
        fabric.broadcast(Point(1) if rank == 1 else None, src=1)
    assert fabric.broadcast(torch.tensor([rank]), src=1).item() == 1
    wrong = lightning.Trainer(**chosen, **settings(folder), num_nodes=2)
    with pytest.raises(pmesh.UsageError, match=r"num_nodes=2 with 1 devices .* 3 have met"):
        wrong.fit(module(), *_loaders())
    dist.destroy_process_group()


def alone(rank: int, folder: str) -> None:
    """Lightning's own choice of a strategy is refused, before and after a process group began."""
    _start(rank, folder, "launched")
    (never,) = callbacks()
    single = {"accelerator": "cpu", "devices": 1}
    for _ in range(2):
        trainer = lightning.Trainer(**single, logger=False, callbacks=[never])
        with pytest.raises(pmesh.UsageError, match=r"write Trainer\(strategy='pmesh'\)"):
            trainer.fit(module(), *_loaders())
        trainer.validate(module(), _loaders()[1], verbose=False)
        fabric = lightning.Fabric(**single, callbacks=[never])
        with pytest.raises(pmesh.UsageError, match=r"write Fabric\(strategy='pmesh'\)"):
            fabric.setup(_net())
        if not dist.is_initialized():
            dist.init_process_group("pmesh")
    dist.destroy_process_group()
    assert callbacks() == []  # it has trained with others, and now does something on its own


class OddLosses(ValidatedDigits):
    """A module that steps by itself, and returns the loss of each row."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.ones(len(batch[0]))


def odd_reports(rank: int, folder: str) -> None:
    """What the callback can't report it leaves out, and the training goes on."""
    chosen = _start(rank, folder, "launched")
    quiet = settings(folder) | {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    for every, kind in ((0, ValidatedDigits), (1, OddLosses)):
        options = quiet | {"log_every_n_steps": every}
        trainer = lightning.Trainer(max_epochs=1, **chosen, **options)
        trainer.fit(kind(0.1), *_loaders())
        assert trainer.current_epoch == 1
    dist.destroy_process_group()


def of_other_checkpoints(rank: int, folder: str) -> None:
    """Each machine has its own disk, and Lightning writes on that of rank 0."""
    chosen = _start(rank, folder, "launched")

    def trainer(epochs: int) -> lightning.Trainer:
        return lightning.Trainer(max_epochs=epochs, **chosen, **settings(folder))

    files = []
    for epochs in (1, 2):
        files.append(f"{folder}/{epochs}.ckpt")
        first = trainer(epochs)
        first.fit(module(), *_loaders(), ckpt_path=files[-2] if epochs == 2 else None)
        first.save_checkpoint(files[-1])
    torn = Path(folder) / f"torn-{rank}"
    torn.write_bytes(b"")
    for other, says in (
        (files[0], r"rank 1: epoch 1, step 5; rank 2: epoch 2, step 10\)"),
        (f"{folder}/none", r"rank 1: no checkpoint \(.*none.*\); rank 2: epoch 2, step 10\)"),
        (str(torn), r"rank 1: no checkpoint \(EOFError.*\); rank 2: epoch 2, step 10\)"),
        (None, r"rank 1: no checkpoint; rank 2: epoch 2, step 10\)"),
    ):
        with pytest.raises(pmesh.UsageError, match=r"different checkpoints \(rank 0: .*" + says):
            trainer(3).fit(module(), *_loaders(), ckpt_path=other if rank == 1 else files[1])
    trainer(3).fit(module(), *_loaders(), ckpt_path=files[1])
    dist.destroy_process_group()


def beside_gloo(rank: int, folder: str) -> None:
    _start(rank, folder, "gloo")
    with pytest.raises(pmesh.UsageError, match="begun one with 'gloo': leave init_process_group"):
        lightning.Trainer(strategy="pmesh", **settings(folder))


def on_mps(rank: int, folder: str) -> None:
    """Where MPS is said to be there, our strategy is not refused, and DDP gets no CUDA device."""
    _start(rank, folder, "launched")
    for kind in (OfFabric, MPSAccelerator):
        kind.is_available = staticmethod(lambda: True)
        kind.parse_devices = staticmethod(lambda *_: [0])
        kind.get_parallel_devices = staticmethod(lambda *_: [torch.device("mps", 0)])
        kind.setup_device = lambda *_: None
    for owner in (lightning.Fabric(strategy="pmesh"), lightning.Trainer(strategy="pmesh")):
        assert owner.strategy.root_device == torch.device("mps", 0)
        assert owner.world_size == RANKS
        assert type(owner.strategy.accelerator) in {OfFabric, MPSAccelerator}
        if isinstance(owner, lightning.Trainer):
            assert owner.strategy.determine_ddp_device_ids() is None
        else:
            wrapped = owner.strategy.setup_module(_net())
            assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
            assert wrapped.device_ids is None
    dist.destroy_process_group()
