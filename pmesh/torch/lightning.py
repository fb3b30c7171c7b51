"""Lightning over pmesh: the strategy "pmesh" of its Trainer and of Fabric.

The strategy is Lightning's DDP with ranks, devices and broadcasts of its own. It uses public names
of Lightning (2.6) only: its registries of strategies, which `extend` fills once a program imports
them, methods that a strategy may override, and the entry points for callbacks.
"""

import os
import sys
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from pmesh.errors import UsageError
from pmesh.torch.library import dist, torch
from pmesh.torch.transformers import check_same


def extend(strategies: Any) -> None:  # noqa: ANN401 - of Lightning
    """Register ours in a package of strategies, which is that of the Trainer or that of Fabric."""
    package = strategies.__name__.rpartition(".")[0]
    environments: Any = import_module(f"{package}.plugins.environments")
    environment = type("PmeshEnvironment", (_Environment, environments.ClusterEnvironment), {})
    of_trainer = hasattr(strategies, "StrategyRegistry")
    registry = strategies.StrategyRegistry if of_trainer else strategies.STRATEGY_REGISTRY
    bases = _OfTrainer if of_trainer else _Strategy, strategies.DDPStrategy
    strategy = type("PmeshStrategy", bases, {"environment": environment})
    registry.register("pmesh", strategy, description="DDP over pmesh")
    registry.register(
        "pmesh_find_unused_parameters_true",
        strategy,
        description="DDP over pmesh, of models that do not use each parameter in each step",
        find_unused_parameters=True,
    )


class _Environment:
    """Lightning's `ClusterEnvironment`: the ranks of pmesh, which it joins when it is first asked.

    A launcher or the user has started the processes, so Lightning starts none and numbers none.
    """

    creates_processes_externally = True
    main_port = 0
    """Nobody connects to it: the mesh has connected the ranks."""

    @property
    def main_address(self) -> str:
        _join()
        return os.environ["MASTER_ADDR"]

    @staticmethod
    def detect() -> bool:
        return _is_among_ranks()

    def world_size(self) -> int:
        _join()
        return int(dist.get_world_size())

    def set_world_size(self, size: int) -> None:
        del size  # the mesh knows it

    def global_rank(self) -> int:
        _join()
        return int(dist.get_rank())

    def set_global_rank(self, rank: int) -> None:
        del rank  # the mesh knows it

    def local_rank(self) -> int:
        _join()
        return int(os.environ["LOCAL_RANK"])

    def node_rank(self) -> int:
        _join()
        return int(os.environ["GROUP_RANK"])

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        size = self.world_size()
        if num_nodes > 1 and num_nodes * num_devices != size:
            raise UsageError(
                f"num_nodes={num_nodes} with {num_devices} devices on each are "
                f"{num_nodes * num_devices} ranks, and {size} have met: leave num_nodes out with "
                "strategy='pmesh', since pmesh knows the ranks"
            )


class _Strategy:
    """What DDP of Lightning does otherwise over pmesh; its second base is the `DDPStrategy`."""

    environment: type[Any]
    parallel_devices: list[Any]
    local_rank: int
    global_rank: int
    world_size: int

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - of torch's DDP
        inner: Any = super()
        inner.__init__(
            cluster_environment=self.environment(), process_group_backend="pmesh", **options
        )
        self._options = options

    @property
    def root_device(self) -> Any:  # noqa: ANN401 - a torch.device
        """The device of this rank: ranks of a machine with fewer devices share them."""
        return self.parallel_devices[self.local_rank % len(self.parallel_devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def determine_ddp_device_ids(self) -> list[int] | None:
        """Return no device for MPS, whose numbers torch's DDP would take for CUDA's."""
        inner: Any = super()
        return None if self.root_device.type == "mps" else inner.determine_ddp_device_ids()

    def setup_module(self, module: Any) -> Any:  # noqa: ANN401 - Fabric's
        """Wrap a module as Fabric's strategy does, but on MPS without numbers of devices."""
        inner: Any = super()
        if self.root_device.type != "mps":
            return inner.setup_module(module)
        return torch.nn.parallel.DistributedDataParallel(module, **self._options)

    def broadcast(self, obj: Any, src: int = 0) -> Any:  # noqa: ANN401 - of Lightning or the user
        """Return the object of rank `src` on all ranks. Nothing that it holds can run code.

        Raises:
            UsageError: on all ranks, if it holds other classes than tensors and plain values.
        """
        from pmesh.torch.objects import broadcast_object  # noqa: PLC0415 - after torch

        kind, data = _packed(obj) if src == self.global_rank else ("", b"")
        kind, data = broadcast_object([kind, data], src)
        if kind == "refused":
            raise UsageError(
                f"strategy='pmesh' broadcasts tensors, plain values and paths, not a {data}: to "
                "unpickle objects of other ranks could run their code; allow the class on all "
                "ranks by torch.serialization.add_safe_globals, or broadcast its fields"
            )
        found = torch.load(BytesIO(data), map_location=self._placed, weights_only=True)
        return Path(str(found)) if kind == "path" else found

    def _placed(self, storage: Any, device: str) -> Any:  # noqa: ANN401 - torch's
        """Put the values of another rank's GPU on the device of this rank."""
        if device == "cpu":
            return storage
        return torch.serialization.default_restore_location(storage, str(self.root_device))


class _OfTrainer(_Strategy):
    """Compares what the ranks go on from: each has found a checkpoint, or none, on its own disk."""

    _is_compared = False

    def setup(self, trainer: Any) -> None:  # noqa: ANN401 - of Lightning
        """Begin to fit or to evaluate, which a rank with a checkpoint has loaded before this."""
        if not self._is_compared:
            self._compare("no checkpoint")
        self._is_compared = False
        inner: Any = super()
        inner.setup(trainer)

    def load_checkpoint(self, checkpoint_path: Any, **options: Any) -> Any:  # noqa: ANN401 - of Lightning
        """Load the checkpoint of this rank.

        Raises:
            UsageError: on all ranks, if they have found different ones, or some have none.
        """
        inner: Any = super()
        try:
            found = inner.load_checkpoint(checkpoint_path, **options)
        except Exception as e:  # whatever it is: the others wait for this rank
            self._compare(f"no checkpoint ({e!r})")
            raise
        self._compare(f"epoch {found.get('epoch')}, step {found.get('global_step')}")
        return found

    def _compare(self, mine: str) -> None:
        from pmesh.torch.objects import all_gather_object  # noqa: PLC0415 - after torch

        self._is_compared = True
        check_same(all_gather_object(mine))


def _packed(obj: object) -> tuple[str, bytes | str]:
    """Return a kind, and the data from which `torch.load(weights_only=True)` makes the object."""
    data = BytesIO()
    try:
        torch.save(str(obj) if isinstance(obj, Path) else obj, data)
        torch.load(BytesIO(data.getvalue()), weights_only=True)
    except Exception:  # noqa: BLE001 - whatever it is, all ranks hear of it
        return "refused", type(obj).__name__
    return "path" if isinstance(obj, Path) else "value", data.getvalue()


def _join() -> None:
    """Begin the default process group, if the program has not.

    Raises:
        UsageError: the program has begun one with another backend.
    """
    if not dist.is_initialized():
        dist.init_process_group("pmesh")
    elif "pmesh" not in dist.get_backend():
        raise UsageError(
            f"strategy='pmesh' needs a process group of the backend 'pmesh', and this program has "
            f"begun one with {dist.get_backend()!r}: leave init_process_group out"
        )


def _is_among_ranks() -> bool:
    """Whether several ranks run this program over pmesh, as far as it has not left them."""
    if dist.is_initialized():
        return "pmesh" in dist.get_backend() and int(dist.get_world_size()) > 1
    if os.environ.get("PMESH_WAIT_FOR", "1") == "1":
        return False
    from pmesh.client.connect import has_joined  # noqa: PLC0415 - few programs ask for it

    return not has_joined()  # else it trains with others by itself, or has done so


def callbacks() -> list[object]:
    """Return a callback for each Trainer and each Fabric; Lightning calls this by an entry point.

    Its own choice of a strategy makes a Trainer on one of several ranks train alone, and say
    nothing.
    """
    if not _is_among_ranks():
        return []
    modules = ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks")
    bases = tuple({sys.modules[name].Callback for name in modules if name in sys.modules})
    return [type("OverPmesh", (_NeverAlone, _ReportsLoss, *bases), {})()]


class _NeverAlone:
    """A callback that refuses to train alone beside other ranks."""

    def setup(self, trainer: Any, pl_module: object, stage: str) -> None:  # noqa: ANN401 - of Lightning
        """Check a Trainer, before it begins."""
        del pl_module
        if stage == "fit":
            _check(trainer, "Trainer")

    def on_after_setup(self, fabric: Any, module: object) -> None:  # noqa: ANN401 - of Lightning
        """Check a Fabric, when it has set up a module."""
        del module
        _check(fabric, "Fabric")


class _ReportsLoss:
    """A callback that reports the loss of a Trainer's step as often as the Trainer logs."""

    def on_train_batch_end(
        self,
        trainer: Any,  # noqa: ANN401 - of Lightning
        pl_module: object,
        outputs: Any,  # noqa: ANN401 - of Lightning
        batch: object,
        batch_idx: int,
    ) -> None:
        """Read the loss, which waits for the device: only where Lightning does it, too."""
        del pl_module, batch
        from pmesh.torch.reports import report  # noqa: PLC0415 - after torch

        every = trainer.log_every_n_steps  # 0: never
        found: Any = outputs or {}
        loss = found.get("loss") if every and (batch_idx + 1) % every == 0 else None
        if loss is not None and loss.numel() == 1:  # a module that steps by itself may have others
            # Lightning has divided it by this.
            report(loss=loss.item() * trainer.accumulate_grad_batches)


def _check(owner: Any, name: str) -> None:  # noqa: ANN401 - a Trainer or a Fabric
    if owner.world_size == 1 and _is_among_ranks():
        raise UsageError(
            f"this is one of several ranks, and this {name} would train alone: write "
            f"{name}(strategy='pmesh')"
        )
