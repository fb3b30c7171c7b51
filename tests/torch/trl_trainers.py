"""Trainers of TRL, each function a program for every rank."""

import inspect
import os
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from pmesh.torch.ranks import WORLDS
from tests.torch import hugging_face
from tests.torch.elastic_trainer import behind, found, in_the_same_order, waiting
from tests.torch.start import fork

COUNT, ROWS, EPOCHS = 60, 12, 2  # five steps for each epoch
KILLED_AT, ALL_AGAIN_AT = 3, 7


def import_libraries() -> None:
    """Import what takes seconds."""
    hugging_face.import_libraries()
    for each in ("datasets", "peft", "trl", "trl.trainer.dpo_trainer", "trl.trainer.sft_trainer"):
        import_module(each)


def texts() -> list[str]:
    """Lines of a program of Python's standard library."""
    lines = inspect.getsource(inspect).splitlines()
    return [line for line in lines if len(line) > 30][:COUNT]


def trainer(kind: str, folder: str, made: Any = lambda base: base, **options: Any) -> Any:
    """`SFTTrainer` of an adapter, or `DPOTrainer` of all weights, of a tiny model.

    Args:
        kind: "sft" or "dpo".
        folder: where it may write.
        made: makes of the class of TRL the one that is used.
        options: further arguments of the training.
    """
    import datasets
    import trl
    from peft import LoraConfig
    from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=384, **sizes, **heads))

    datasets.disable_progress_bars()
    config, base, rate = {
        "sft": (trl.SFTConfig, trl.SFTTrainer, 1e-1),
        "dpo": (trl.DPOConfig, trl.DPOTrainer, 1e-2),
    }[kind]
    chosen = {"num_train_epochs": EPOCHS, "learning_rate": rate, "logging_steps": 2, "seed": 3}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    arguments = config(folder, bf16=False, **(chosen | quiet | options))
    lines = texts()
    if kind == "sft":
        rows = [{"text": line} for line in lines]
        adapter = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
        more = {"peft_config": adapter}
    else:
        rows = [
            {"prompt": line[:15], "chosen": line[15:], "rejected": line[15:].upper()}
            for line in lines
        ]
        more = {"ref_model": model()}
    return made(base)(
        model(),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=ByT5Tokenizer(),
        **more,
    )


def unchanged(rank: int, folder: str, kind: str, backend: str) -> None:
    """As a script of TRL has it, by DDP."""
    cpu = hugging_face.start(rank, backend, folder)
    training = trainer(kind, folder, use_cpu=cpu, per_device_train_batch_size=ROWS // 3)
    training.train()
    assert isinstance(training.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    losses = [each["loss"] for each in training.state.log_history if "loss" in each]
    hugging_face.end(rank, folder, {"net": training.model.state_dict(), "losses": losses})


def alone(_: int, folder: str, kind: str) -> None:
    """TRL's own trainer in one process, on the batches of all ranks."""
    training = trainer(
        kind,
        folder,
        lambda base: in_the_same_order(base, ROWS),
        use_cpu=True,
        per_device_train_batch_size=ROWS,
    )
    found(training, training.train(), folder, "alone")


def elastic(rank: int, folder: str, kind: str, kills: str) -> None:
    """The same by three ranks; rank 1 may be killed in the backward pass, and starts again."""

    def end_of(*, will_die: bool) -> int:
        child = fork(rank, lambda rank: _train(rank, folder, kind, will_die=will_die))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    if kills == "killed" and rank == 1:
        assert end_of(will_die=True) == -signal.SIGKILL
    assert end_of(will_die=False) == 0


def _train(rank: int, folder: str, kind: str, *, will_die: bool) -> None:
    import_module("pmesh.torch.elastic_trainer")  # not for programs of others that are forked here
    training = trainer(
        kind,
        str(Path(folder) / f"out-{rank}"),
        lambda base: waiting(behind(base), ALL_AGAIN_AT),
        use_cpu=True,
        per_device_train_batch_size=ROWS // 3,
    )
    mesh = WORLDS.elastic.mesh  # type: ignore[union-attr]

    def die(_: torch.Tensor) -> None:
        if training.state.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    if will_die:
        next(each for each in training.model.parameters() if each.requires_grad).register_hook(die)
    found(training, training.train(), folder, str(rank))
    mesh.close()
