"""How ranks of `torch.distributed` start, each a program for every rank."""

import contextlib
import os
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import pmesh
import pmesh.torch
from pmesh.torch.backends import answer_for_others
from pmesh.torch.ranks import WORLDS

RANKS = 3


def check_sum(group: Any = None) -> None:
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=group)
    assert x.item() == 3.0


def by_options(rank: int) -> None:
    """Nothing in the environment says how many ranks there are."""
    del os.environ["PMESH_WAIT_FOR"]
    with refused("how many ranks are there"):
        dist.init_process_group("pmesh")
    with refused("takes pg_options=pmesh.torch.Options"):
        dist.init_process_group("pmesh", pg_options=object())
    options = pmesh.torch.Options(job="by-options", wait_for=RANKS)
    dist.init_process_group("pmesh", pg_options=options)
    check_sum()
    check_objects(rank)
    told = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    mine = str(dist.get_rank())  # all ranks are on one machine
    assert told == {"RANK": mine, "LOCAL_RANK": mine, "WORLD_SIZE": str(RANKS)}
    store = dist.distributed_c10d._get_default_store()
    check_store(store)
    dist.destroy_process_group()
    assert not told.keys() & os.environ.keys()


def check_objects(rank: int) -> None:
    """Ours, which do not unpickle; `src` is a rank of the default group, as in torch."""
    mine = dist.get_rank()
    assert pmesh.torch.all_gather_object([mine, None]) == [[each, None] for each in range(RANKS)]
    assert pmesh.torch.broadcast_object({"of": mine}, 1) == {"of": 1}
    reverse = dist.new_group([2, 0])
    if mine != 1:
        assert sorted(pmesh.torch.all_gather_object(mine, reverse)) == [0, 2]
        assert pmesh.torch.broadcast_object(mine, 2, reverse) == 2


def check_store(store: Any) -> None:
    """All that a Store can, in Python and through the PrefixStore around it."""
    rank = dist.get_rank()
    store.set(f"of-{rank}", "a")
    store.wait([f"of-{each}" for each in range(RANKS)], timedelta(seconds=60))
    assert store.get("of-1") == b"a"
    assert store.check(["of-0", "of-2"])
    assert not store.check(["of-0", "nothing"])
    dist.barrier()
    if rank == 0:
        assert store.add("n", 4) == 4
        assert store.compare_set("new", "", "b") == b"b"
        assert store.compare_set("new", "a", "c") == b"b"
        assert store.compare_set("none", "a", "c") == b"a"
        store.append("new", "c")
        store.multi_set(["x", "y"], ["1", "2"])
        assert store.multi_get(["new", "x", "y"]) == [b"bc", b"1", b"2"]
        keys = store.num_keys()
        assert store.delete_key("x")
        assert not store.delete_key("x")
        assert store.num_keys() == keys - 1
        assert store.has_extended_api()
        store.set_timeout(timedelta(milliseconds=1))
        with refused("OpTimedOut"):
            store.get("nothing")
    dist.barrier()


def twice_by_url(rank: int) -> None:
    """A second group of a process is another job."""
    for _ in range(2):
        dist.init_process_group("pmesh", init_method="pmesh://")
        check_sum()
        dist.destroy_process_group()


def with_ranks_given(rank: int, folder: str) -> None:
    """Ranks stay as they are given, whatever those of the mesh; the groups of torch too."""
    given = (rank + 1) % RANKS
    init = f"file://{folder}/given"
    dist.init_process_group("pmesh", init_method=init, rank=given, world_size=RANKS)
    assert dist.get_rank() == given
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, rank)
    assert everyone == [(each - 1) % RANKS for each in range(RANKS)]
    pair = dist.new_group([1, 2])
    if given:
        told = torch.tensor([given])
        dist.broadcast(told, 2, group=pair)
        assert told.item() == 2
        inner = pair.split_group([1, 0])
        assert inner is not None
        assert inner.rank() == 2 - given
        inner.allreduce([told]).wait()
        assert told.item() == 4
    by_gloo = dist.new_group(backend="gloo")
    check_sum(by_gloo)
    dist.destroy_process_group()


def by_a_launcher(rank: int, folder: str) -> None:
    """As torchrun sets them; a store of torch's is what the address is of."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    with refused("MASTER_ADDR"):
        dist.init_process_group("pmesh")
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    with refused("RANK"):
        dist.init_process_group("gloo")  # as ever
    init = f"file://{folder}/mixed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("cpu:gloo,mps:pmesh", init, rank=rank, world_size=RANKS)
    check_sum()
    dist.destroy_process_group()


def by_a_launcher_of_one(rank: int, folder: str) -> None:
    """torchrun, which `pmesh run` has started on each machine: each rank would train alone."""
    launched(rank)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    with refused("WORLD_SIZE=1, and PMESH_WAIT_FOR is 3: the others would be missing"):
        dist.init_process_group("pmesh", f"file://{folder}/{rank}", rank=0, world_size=1)


def launched(rank: int) -> None:
    """What `pmesh run --on` sets."""
    size = os.environ["PMESH_WAIT_FOR"]
    os.environ |= {"RANK": str(rank), "PMESH_PLACE": str(rank), "WORLD_SIZE": size}


def by_a_launch(rank: int) -> None:
    """The ranks are the launch's, in whatever order they have joined the mesh."""
    launched(rank)
    for _ in range(2):  # the second group is another job, with the same ranks
        dist.init_process_group("pmesh")
        assert (dist.get_rank(), dist.get_world_size()) == (rank, RANKS)
        x = torch.tensor([float(rank)])
        dist.broadcast(x, 2)
        assert x.item() == 2.0
        check_sum()
        dist.destroy_process_group()
        assert os.environ["RANK"] == str(rank)
    dist.init_process_group("pmesh", rank=rank, world_size=RANKS)  # as accelerate calls it
    assert dist.get_rank() == rank
    dist.destroy_process_group()


def partly_by_a_launch(rank: int) -> None:
    if rank:
        launched(rank)
    with refused("one that it has not started; start all of them by one command"):
        dist.init_process_group("pmesh")


def for_other_backends(rank: int) -> None:
    """A script for gloo and nccl, under --backend pmesh."""
    launched(rank)
    answer_for_others()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    assert (dist.get_backend(), dist.get_rank()) == ("pmesh", rank)
    check_sum()
    group = dist.new_group([0, 1, 2], backend="gloo")
    assert dist.get_backend(group) == "pmesh"
    check_sum(group)
    dist.destroy_process_group()


def beside_gloo(rank: int, folder: str) -> None:
    """A group of pmesh where the default one is gloo's."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/beside", rank=rank, world_size=3)
    group = dist.new_group(backend="pmesh")
    check_sum(group)
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    assert x.item() == 3.0
    dist.destroy_process_group()


def of_other_sizes(rank: int, folder: str) -> None:
    """One rank has another world size: an error on all of them, in time."""
    size = 2 if rank == 1 else 3
    store = dist.FileStore(f"{folder}/sizes")
    seconds = timedelta(seconds=3)
    with refused("NotEnoughRanks|do not fit together|runs already|JobRunning"):
        dist.init_process_group("pmesh", None, seconds, size, rank, store)


def of_other_models(rank: int) -> None:
    """One rank has a model that does not fit: torch tells it there, and all others get an error.

    DDP's constructor may have ended on them by then; their next call does not.
    """
    whys = {"shape": "appears not to match", "meta": "of the device 'meta', without data"}
    for kind, why in whys.items():
        dist.init_process_group("pmesh")
        odd = dist.get_rank() == 1
        model = torch.nn.Linear(4, 3 if odd and kind == "shape" else 4)
        if odd and kind == "meta":
            model = model.to("meta")
        with refused(why if odd else "RankLost: rank 1 .* is lost"):
            try:
                torch.nn.parallel.DistributedDataParallel(model)
                dist.barrier()
            finally:
                if odd:
                    crash()
        dist.destroy_process_group()


def crash() -> None:
    """Leave the job as a script does that ends by an exception."""
    world = WORLDS.current
    assert world is not None
    world.mesh.__exit__(RuntimeError, RuntimeError("it has ended"), None)


def without_an_agent(rank: int, folder: str) -> None:
    os.environ["PMESH_HOME"] = f"{folder}/nobody"
    with refused("AgentNotRunning.*pmesh up"):
        dist.init_process_group("pmesh")


def with_a_loss(rank: int) -> None:
    """One is killed in the middle; the others get one error, in each op after it."""
    dist.init_process_group("pmesh")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    found: object = None
    for step in range(5):
        if step == 2 and dist.get_rank() == 1:
            os._exit(0)
        try:
            model(torch.ones(1, 4)).sum().backward()
        except RuntimeError as e:
            found = step, "RankLost" in str(e)
            break
    assert found == (2, True)
    for _ in range(2):
        with refused(r"RankLost: rank 1 .* is lost.*; torch fixes .*init\(elastic=True\)"):
            dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def with_compression(rank: int) -> None:
    """DDP trains with compressed gradients, with the same bits on all ranks."""
    dist.init_process_group("pmesh")
    for scheme in ("int8", pmesh.PowerSGD(rank=2, start_step=1), "none"):
        torch.manual_seed(1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        model.register_comm_hook(None, pmesh.torch.compression_hook(scheme))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        torch.manual_seed(rank)
        losses: list[float] = []
        for _ in range(20):
            x = torch.randn(16, 64)
            optimizer.zero_grad()
            loss = ((model(x) - x) ** 2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0], (scheme, losses)
        weights = model.module.weight.detach()
        others = [torch.empty_like(weights) for _ in range(RANKS)]
        dist.all_gather(others, weights)
        assert all(torch.equal(weights, other) for other in others)
    dist.destroy_process_group()


@contextlib.contextmanager
def refused(why: str) -> Any:
    import re

    try:
        yield
    except (RuntimeError, ValueError, pmesh.PmeshError) as e:
        assert re.search(why, f"{type(e).__name__}: {e}", re.DOTALL), (why, e)  # noqa: PT017
    else:
        raise AssertionError(f"nobody has said {why!r}")
    sys.stdout.flush()
