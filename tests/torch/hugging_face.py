"""Hugging Face's scripts as each of several ranks, such as `pmesh run` and torchrun start them."""

import argparse
import os
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

import pmesh.torch
from tests.torch.gloo import begin_gloo
from tests.torch.reported import reported

RANKS = 3


def import_libraries() -> None:
    """Import what takes seconds."""
    for each in ("accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama"):
        import_module(each)


def start(rank: int, backend: str, folder: str) -> bool:
    """Set what the launcher sets; return whether Accelerate must be told to use the CPU."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ |= {name: str(value) for name, value in told.items()}
    if backend == "gloo":
        del os.environ["PMESH_WAIT_FOR"]
        begin_gloo(folder, rank, RANKS)
        return True
    os.environ |= {"PMESH_PLACE": str(rank), "PMESH_JOB": Path(folder).name}
    return False


def end(rank: int, folder: str, found: dict[str, Any]) -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (rank, RANKS)
    torch.save(found, f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()


def loop(rank: int, folder: str, backend: str) -> None:
    """A loop over Accelerate: accumulation, a schedule, and a metric over all ranks' rows."""
    cpu = start(rank, backend, folder)
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(0)
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=2)
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    rows, others = (torch.utils.data.TensorDataset(x[part], y[part]) for part in _PARTS)
    net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    net, optimizer, train, test, schedule = accelerator.prepare(
        net,
        optimizer,
        torch.utils.data.DataLoader(rows, batch_size=25, shuffle=True),
        torch.utils.data.DataLoader(others, batch_size=40),
        torch.optim.lr_scheduler.StepLR(optimizer, 10),
    )
    for images, labels in train:
        with accelerator.accumulate(net):
            accelerator.backward(torch.nn.functional.cross_entropy(net(images), labels))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    right = count = 0
    for images, labels in test:
        pair = accelerator.gather_for_metrics((net(images).argmax(1), labels))
        right, count = right + int((pair[0] == pair[1]).sum()), count + len(pair[0])
    assert isinstance(net, torch.nn.parallel.DistributedDataParallel)
    assert accelerator.is_main_process == (rank == 0)
    end(rank, folder, {"net": net.state_dict(), "right": right, "count": count})


_PARTS = slice(0, 700), slice(700, 1000)


def trainer(rank: int, folder: str, backend: str, **options: object) -> None:
    """Transformers' Trainer: trains a tiny language model on Python's source, and evaluates it."""
    cpu = start(rank, backend, folder)
    training = _tiny(folder, use_cpu=cpu, save_strategy="no", **options)
    training.train()
    losses = [each["loss"] for each in training.state.log_history if "loss" in each]
    loss = training.evaluate()["eval_loss"]
    assert isinstance(training.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    if backend == "pmesh":
        dist.barrier()
        for reports in reported(Path(folder).name):
            assert {"grad_norm", "learning_rate"} < reports.keys()
            assert (reports["loss"], reports["eval_loss"]) == (losses[-1], loss)
        dist.barrier()
    else:
        pmesh.torch.report(loss=0.5)  # which nobody reads
    end(rank, folder, {"net": training.model.state_dict(), "losses": losses, "loss": loss})


def _tiny(folder: str, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

    set_seed(0)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    rows = [{"input_ids": row, "labels": row} for row in text[: 120 * 32].view(120, 32)]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, **heads))
    arguments = TrainingArguments(
        folder,
        max_steps=4,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=2,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    return Trainer(model, arguments, train_dataset=rows[:100], eval_dataset=rows[100:])


def of_other_checkpoints(rank: int, folder: str) -> None:
    """One machine has the checkpoint, the others begin anew."""
    start(rank, "pmesh", folder)
    first = _tiny(folder, save_steps=2)
    first.train()
    last = f"{folder}/checkpoint-2"
    for other, steps in (
        (None, "0; rank 1: step 2; rank 2: step 0"),
        (f"{folder}/checkpoint-4", ""),
    ):
        says = rf"different checkpoints \(rank 0: step {steps}"
        with pytest.raises(pmesh.UsageError, match=says):
            _tiny(folder).train(resume_from_checkpoint=last if rank == 1 else other)
    again = _tiny(folder, save_strategy="no")
    again.train(resume_from_checkpoint=last)
    for name, value in first.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], value, rtol=1e-5, atol=1e-5)
    dist.destroy_process_group()


def on_mps(rank: int, folder: str, backend: str) -> None:
    """The loop where MPS is said to be there; its tensors stay on the CPU, which is here."""
    import accelerate.state

    def device(_: object) -> torch.device:
        return torch.device("cpu")

    _pretend(torch.backends.mps, "is_available")
    _pretend(accelerate.state, "is_mps_available")
    accelerate.state.PartialState.default_device = property(device)
    loop(rank, folder, backend)


def _pretend(module: ModuleType, name: str) -> None:
    def is_available(*_: object) -> bool:
        return True

    assert hasattr(module, name)
    setattr(module, name, is_available)


def answered(rank: int, folder: str, backend: str) -> None:
    """The trainer with the backend gloo, as `pmesh run --backend pmesh` starts it."""
    from pmesh.torch.backends import answer_for_others

    answer_for_others()
    trainer(rank, folder, backend, ddp_backend="gloo")


def alone(rank: int, folder: str) -> None:
    """Accelerate trains alone over gloo, on a CPU that it was not told to use."""
    start(rank, "pmesh", folder)
    from transformers import TrainingArguments

    with pytest.raises(pmesh.UsageError, match="over 'gloo' Accelerate would train on each"):
        TrainingArguments(folder, ddp_backend="gloo").device  # noqa: B018 - it begins


def timeout(rank: int, folder: str) -> None:
    """The script says how long an op may take: rank 0 waits no longer for the others."""
    start(rank, "pmesh", folder)
    from accelerate import Accelerator, InitProcessGroupKwargs

    within = InitProcessGroupKwargs(timeout=timedelta(seconds=10))
    accelerator = Accelerator(kwargs_handlers=[within])
    store = dist.distributed_c10d._get_default_store()
    if rank:
        store.wait(["too late"], timedelta(minutes=1))
    else:
        with pytest.raises(dist.DistBackendError, match="did not end within 10 s"):
            accelerator.wait_for_everyone()
        store.set("too late", "")
    dist.destroy_process_group()


def untried(rank: int, folder: str) -> None:
    """Accelerate of a version that pmesh was never tried with."""
    start(rank, "pmesh", folder)
    import pmesh.torch.accelerate as plug

    plug.TRIED = "0.34"
    from accelerate import Accelerator

    with pytest.raises(pmesh.UsageError, match="never been tried with accelerate") as caught:
        Accelerator()
    assert "pip install 'accelerate==0.34.*'" in str(caught.value)


def sharded(rank: int, folder: str) -> None:
    """FSDP through Accelerate, which would keep the whole model on each rank, and not say so."""
    start(rank, "pmesh", folder)
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    with pytest.raises(pmesh.UsageError, match=r"shards a model .* on CUDA only"):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
