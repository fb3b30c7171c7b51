"""The process group's methods, among threads."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import pmesh
import pmesh.torch
from pmesh.client.calls.queue import Handle
from pmesh.client.mesh import Mesh
from pmesh.errors import MeshClosed
from pmesh.testing import SimulatedMesh
from pmesh.torch.arguments import StagedTensor
from pmesh.torch.process_group import ProcessGroup
from pmesh.torch.work import MessageWork, Work
from tests.torch.groups import group_of, reducing, run

PATIENCE_S = 20.0
FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
COMPLEX = ("complex128", "complex64")
ADDED = (*FLOATS, *COMPLEX, *INTEGERS, "bool")
MOVED = (*ADDED, "float8_e4m3fn", "float8_e5m2")


def reducing_at(op: Any, root: int) -> Any:
    options = dist.ReduceOptions()
    options.reduceOp, options.rootRank = op, root
    return options


def bits(x: torch.Tensor) -> list[int]:
    flat = x.contiguous().reshape(-1).view(torch.uint8)
    return [int(each) for each in flat]


@pytest.mark.parametrize("dtype", ADDED)
@pytest.mark.parametrize("waits", [True, False])
def test_values_of_every_dtype_that_adds_are_added(dtype: str, *, waits: bool) -> None:
    def program(group: ProcessGroup) -> Any:
        x = torch.tensor([0, 1, 2]).to(getattr(torch, dtype))
        group.allreduce([x], reducing(ReduceOp.SUM, waits=waits)).wait()
        return bits(x)

    expected = torch.tensor([0, 3, 6]).to(getattr(torch, dtype))
    assert run(program) == [bits(expected)] * 3


@pytest.mark.parametrize("dtype", MOVED)
def test_values_of_every_dtype_are_moved(dtype: str) -> None:
    def tensor(rank: int) -> torch.Tensor:
        return torch.tensor([[rank, 1], [0, 1]]).to(getattr(torch, dtype))

    def program(group: ProcessGroup) -> Any:
        rank, told = group.rank(), tensor(group.rank())
        options = dist.BroadcastOptions()
        options.rootRank = 2
        group.broadcast([told], options).wait()
        gathered = [torch.empty_like(told) for _ in range(3)]
        group.allgather([gathered], [tensor(rank)]).wait()
        came = torch.empty_like(told)
        sent = group.send([tensor(rank)], (rank + 1) % 3, 5)
        group.recv([came], (rank + 2) % 3, 5).wait()
        sent.wait()
        return [bits(each) for each in (told, *gathered, came)]

    for rank, found in enumerate(run(program)):
        everyone = [bits(tensor(each)) for each in range(3)]
        assert found == [everyone[2], *everyone, everyone[(rank + 2) % 3]]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, 9),
        (ReduceOp.PRODUCT, 24),
        (ReduceOp.MIN, 2),
        (ReduceOp.MAX, 4),
        (ReduceOp.BAND, 0),
        (ReduceOp.BOR, 7),
        (ReduceOp.BXOR, 5),
    ],
)
def test_all_reductions_of_integers(op: Any, expected: int) -> None:
    def program(group: ProcessGroup) -> Any:
        x = torch.tensor(group.rank() + 2)  # without a dimension
        group.allreduce([x], reducing(op)).wait()
        return x.item()

    assert run(program) == [expected] * 3


def test_a_mean_and_a_sum_of_products() -> None:
    def program(group: ProcessGroup) -> Any:
        x, y = torch.tensor([group.rank() + 1.0]), torch.tensor([group.rank() + 1.0])
        group.allreduce([x], reducing(ReduceOp.AVG)).wait()
        group.allreduce([y], reducing(dist._make_nccl_premul_sum(0.5))).wait()
        out, parts = torch.zeros(1), torch.arange(3.0)
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist._make_nccl_premul_sum(2.0)
        group.reduce_scatter_single(out, parts, options).wait()
        return [x.item(), y.item(), out.item()]

    assert run(program) == [[2.0, 3.0, 6.0 * rank] for rank in range(3)]


def test_tensors_of_the_inference_mode_are_written_to_by_other_threads() -> None:
    def program(group: ProcessGroup) -> Any:
        with torch.inference_mode():
            x, came = torch.ones(2, 3).t(), torch.zeros(2, 3).t()
            group.allreduce([x], reducing(ReduceOp.SUM)).wait()
            sent = group.send([x], (group.rank() + 1) % 3)
            coming = group.recv([came], (group.rank() + 2) % 3)
        coming.get_future().wait()
        sent.wait()
        return [x.tolist(), came.tolist()]

    assert run(program) == [[[[3.0] * 2] * 3] * 2] * 3


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "int8", "uint8"])
def test_a_mean_of_integers_is_rounded_towards_zero(dtype: str) -> None:
    signed = dtype != "uint8"

    def program(group: ProcessGroup) -> Any:
        values = [group.rank() + 1, 7 + group.rank() % 2, -5 if signed else 5]
        x = torch.tensor(values).to(getattr(torch, dtype))
        out, parts = torch.zeros(1, dtype=x.dtype), x.clone()
        group.reduce([at_one := x.clone()], reducing_at(ReduceOp.AVG, 1)).wait()
        group.allreduce([x], reducing(ReduceOp.AVG)).wait()
        options: Any = dist.ReduceScatterOptions()
        options.reduceOp = ReduceOp.AVG
        group.reduce_scatter_single(out, parts, options).wait()
        return [x.tolist(), out.item(), at_one.tolist() if group.rank() == 1 else None]

    mean = [2, 7, -5 if signed else 5]
    assert run(program) == [[mean, mean[rank], mean if rank == 1 else None] for rank in range(3)]


def test_tensors_in_several_pieces_or_of_no_size_or_of_a_parameter() -> None:
    def program(group: ProcessGroup) -> Any:
        columns = torch.arange(6.0).reshape(2, 3).T
        conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
        nothing = torch.empty(0, 3)
        parameter = torch.nn.Parameter(torch.ones(2))
        for x in (columns, conjugate, nothing, parameter):
            group.allreduce([x]).wait()
            group.broadcast([x]).wait()
        halves = torch.zeros(4, 3)[:, ::2]
        group.all_gather_single(halves, torch.full((2, 2), float(group.rank()))).wait()
        seen = [columns.tolist(), conjugate.tolist(), parameter.tolist(), halves.tolist()]
        return [*seen, parameter.requires_grad, parameter.grad_fn]

    expected = [
        [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]],
        [2 - 4j, 6 + 2j],
        [2.0, 2.0],
        [[0.0, 0.0]] * 2 + [[1.0, 1.0]] * 2,
        *(True, None),
    ]
    assert run(program, ranks=2) == [expected] * 2


def test_short_forms_and_names_of_all_versions_of_torch() -> None:
    def program(group: ProcessGroup) -> Any:
        rank, two = group.rank(), group.size()
        x = torch.tensor([rank + 1.0])
        group.allreduce(x, ReduceOp.MAX).wait()
        group.allreduce([x], op=ReduceOp.SUM, timeout=timedelta(seconds=50)).wait()
        told = torch.tensor([float(rank)])
        group.broadcast(told, root=1).wait()
        group.broadcast(told, 1).wait()
        group.reduce(y := torch.ones(1), root=0).wait()
        base, part = torch.zeros(two), torch.zeros(1)
        group._allgather_base(base, torch.tensor([float(rank)])).wait()
        group._reduce_scatter_base(part, base).wait()
        swapped = torch.zeros(two)
        group.alltoall_base(swapped, base, [], []).wait()
        many = [torch.zeros(two), torch.zeros(two, dtype=torch.int8)]
        ones = [torch.ones(1), torch.ones(1, dtype=torch.int8)]
        group.allgather_into_tensor_coalesced(many, ones).wait()
        sums = [torch.zeros(1)]
        group.reduce_scatter_tensor_coalesced(sums, [torch.arange(2.0)]).wait()
        lists = [[torch.zeros(1)], [torch.zeros(1)]]
        group.allgather_coalesced(lists, [torch.tensor([3.0])]).wait()
        group.barrier(timeout=timedelta(seconds=50)).wait()
        group.monitored_barrier(timedelta(seconds=50), wait_all_ranks=True)
        found = [x, told, base, part, swapped, *many, *sums, lists[0][0], lists[1][0]]
        return [each.tolist() for each in found] + [y.item() if rank == 0 else 2.0]

    rest = [[3.0], [3.0], 2.0]
    assert run(program, ranks=2) == [
        [[4.0], [1.0], [0.0, 1.0], [2.0 * r], [float(r)] * 2, [1.0] * 2, [1] * 2, [2.0 * r], *rest]
        for r in range(2)
    ]


def said_by(barrier: Callable[[], None]) -> str:
    try:
        barrier()
    except dist.DistBackendError as e:
        return str(e)
    return ""


def test_who_does_not_come_to_a_monitored_barrier_is_named_and_may_come_to_the_next() -> None:
    def program(group: ProcessGroup) -> Any:
        said = ""
        group.barrier().wait()  # a busy machine may begin a rank late
        if group.rank() != 1:
            said = said_by(lambda: group.monitored_barrier(timedelta(seconds=2)))
        x = torch.ones(1)
        group.allreduce([x]).wait()
        group.monitored_barrier(timedelta(seconds=50))
        return said, x.item()

    late = "Rank 1 failed to pass monitoredBarrier in 2000 ms"
    first, second, third = run(program)
    assert first == (f"OpTimedOut: Timed out : {late}", 3)
    assert second == ("", 3)
    assert third[0].endswith(
        "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for "
        f"send/recv from rank 0: {late}"
    )


def test_a_monitored_barrier_names_all_who_do_not_come_or_the_first() -> None:
    def program(group: ProcessGroup) -> Any:
        soon, said = timedelta(seconds=0.2), list[str]()
        if group.rank() == 0:
            for all_ranks in (True, False):
                said += [said_by(lambda w=all_ranks: group.monitored_barrier(soon, w))]
        group.barrier().wait()
        return [*said, said_by(lambda: group.monitored_barrier(timedelta(0)))]

    of_all, of_first, of_0 = run(program)[0]
    assert "Ranks 1, 2 failed to pass monitoredBarrier in 200 ms" in of_all
    assert "Rank 1 failed to pass monitoredBarrier in 200 ms" in of_first
    assert "Rank 0 timed out in monitoredBarrier after 0 ms" in of_0


def test_a_rank_that_is_lost_ends_a_monitored_barrier_at_once_for_all() -> None:
    told = threading.Event()

    def program(group: ProcessGroup) -> Any:
        group.barrier().wait()
        if group.rank() == 2:
            return ""
        said = said_by(lambda: group.monitored_barrier(timedelta(seconds=500)))
        if group.rank() == 1:
            told.set()
        told.wait(100)  # who leaves tells nobody
        return said

    first, second, _ = run(program)
    assert first.startswith("RankLost: ")
    assert "Rank 1 successfully reached monitoredBarrier" in second
    lost, _, advice = first.removeprefix("RankLost: ").partition("; ")
    assert second.endswith(lost)
    assert "pmesh.torch.init(elastic=True)" in advice


def test_lists_with_roots_and_messages_from_anyone() -> None:
    def program(group: ProcessGroup) -> Any:
        rank = group.rank()
        gather, scatter = dist.GatherOptions(), dist.ScatterOptions()
        gather.rootRank = scatter.rootRank = 1
        outs = [torch.zeros(1) for _ in range(3)]
        x, mine = torch.tensor([float(rank)]), torch.zeros(1)
        group.gather([outs] if rank == 1 else [], [x], gather).wait()
        group.scatter([mine], [outs] if rank == 1 else [], scatter).wait()
        lists = [torch.zeros(1 + i) for i in range(3)]
        group.alltoall(lists, [torch.full((1 + rank,), float(rank)) for _ in range(3)]).wait()
        out = torch.zeros(1)
        group.reduce_scatter([out], [[x.clone() for _ in range(3)]]).wait()
        sources: list[int] = []
        if rank == 0:
            for _ in range(2):
                work = group.recv_anysource([came := torch.zeros(1)], 3)
                work.wait()
                assert came.item() == work._source_rank()
                sources.append(work.source_rank())
        else:
            group.send([x], 0, 3).wait()
        return [mine.item(), out.item(), [each.tolist() for each in lists], sorted(sources)]

    swapped = [[0.0], [1.0] * 2, [2.0] * 3]
    assert run(program) == [[float(r), 3.0, swapped, [1, 2] if r == 0 else []] for r in range(3)]


def test_a_future_gets_the_tensors_and_its_callbacks_run() -> None:
    def program(group: ProcessGroup) -> Any:
        x, came = torch.ones(1), torch.zeros(1)
        work = group.allreduce([x])
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        work.wait()
        done = group.allreduce([x], reducing(ReduceOp.MAX, waits=True))
        sent = group.send([x], 1 - group.rank())
        received = group.recv([came], 1 - group.rank()).get_future()
        received.wait()
        sent.synchronize()
        assert done.is_completed()
        assert done.is_success()
        assert done.exception() is None
        assert done.result()[0] is x
        assert sent.is_completed()
        return [doubled.wait().item(), received.value()[0].item(), came.item()]

    assert run(program, ranks=2) == [[4.0, 2.0, 2.0]] * 2


def test_a_callback_may_call_ops_and_wait_for_them() -> None:
    def program(group: ProcessGroup) -> Any:
        def add_again(future: Any) -> Any:
            (x,) = future.value()
            group.allreduce([x]).wait()
            group.allreduce([x], reducing(ReduceOp.SUM, waits=True))
            return x.item()

        return group.allreduce([torch.ones(1)]).get_future().then(add_again).wait()

    assert run(program, ranks=2) == [8.0] * 2


class LateMessage:
    """A message that comes when the test says so, or fails at once."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ended, self.asked = threading.Event(), threading.Event()
        self._error = error

    def take(self, seconds: float | None) -> int:
        self.asked.set()
        if self._error is not None:
            raise self._error
        if not self.ended.wait(seconds):
            raise dist.DistBackendError("Timed out")
        return 1

    def work(self) -> MessageWork:
        return MessageWork(Handle(self.ended.is_set, self.take), self.take, [torch.ones(1)])


def test_the_future_of_a_message_gets_the_error_of_a_group_that_has_lost_a_rank() -> None:
    work = LateMessage(dist.DistBackendError("RankLost")).work()  # though it is still under way
    with pytest.raises(Exception, match="RankLost"):
        work.get_future().wait()
    with pytest.raises(dist.DistBackendError, match="RankLost"):
        work.wait()


def test_who_waits_for_a_message_does_so_as_long_as_it_likes_beside_its_future() -> None:
    message = LateMessage()
    work = message.work()
    future = work.get_future()
    assert message.asked.wait(20)
    with pytest.raises(dist.DistBackendError, match="Timed out"):
        work.wait(timedelta(seconds=0.01))
    message.ended.set()
    assert future.wait()
    assert work.source_rank() == 1


def test_an_op_that_fails_raises_when_it_is_waited_for_and_in_its_future() -> None:
    def program(group: ProcessGroup) -> str:
        work: Work = group.allreduce([torch.ones(2 + group.rank())])
        future = work.get_future()
        with pytest.raises(dist.DistBackendError, match="OpMismatch"):
            work.wait()
        with pytest.raises(Exception, match="OpMismatch"):
            future.wait()
        assert isinstance(work.exception(), dist.DistBackendError)
        assert not work.is_success()
        with pytest.raises(dist.DistBackendError, match="OpMismatch"):
            group.allreduce([torch.ones(2 + group.rank())], reducing(ReduceOp.SUM, waits=True))
        group.allreduce([torch.ones(1)]).wait()  # nobody was lost
        return "raised"

    assert run(program) == ["raised"] * 3


@pytest.mark.parametrize("waits", [True, False])
def test_another_dtype_at_one_rank_is_an_error_at_all(*, waits: bool) -> None:
    def program(group: ProcessGroup) -> str:
        dtype = torch.float64 if group.rank() == 1 else torch.float32
        with pytest.raises(dist.DistBackendError, match="OpMismatch") as e:
            group.allreduce(
                [torch.ones(2, dtype=dtype)], reducing(ReduceOp.SUM, waits=waits)
            ).wait()
        return str(e.value)

    errors = run(program)
    assert errors[1:] == errors[:1] * 2
    assert "float64" in errors[0]


def test_a_lost_rank_ends_the_group_with_one_error() -> None:
    simulated = SimulatedMesh(3)

    def train(mesh: Mesh) -> Any:
        group = group_of(mesh)
        if mesh.rank == 2:
            simulated.lose(2)
        errors: list[str] = []
        for _ in range(3):
            with pytest.raises(dist.DistBackendError) as e:
                group.allreduce([torch.ones(1)]).wait()
            errors.append(str(e.value))
        with pytest.raises(dist.DistBackendError):
            group.send([torch.ones(1)], (mesh.rank + 1) % 2).wait()
        if mesh.rank == 2:
            raise MeshClosed("as its program would")
        assert len(set(errors)) == 1
        return errors[0]

    first, second = simulated.run(train)
    assert first == second
    assert first.startswith("RankLost: rank 2 (simulated) is lost")


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # CSR is in beta
def test_what_can_t_be_sent_is_refused_by_name() -> None:
    group = run(lambda group: group, ranks=1)[0]
    for x, why in [
        (torch.ones(2, 2).to_sparse_csr(), "dense tensors, not torch.sparse_csr"),
        (torch.ones(2, device="meta"), "'meta', without data"),
    ]:
        with pytest.raises(ValueError, match=why):
            group.allreduce([x])
    with pytest.raises(dist.DistBackendError, match="float8_e5m2 is not supported"):
        group.allreduce([torch.ones(2).to(torch.float8_e5m2)]).wait()
    with pytest.raises(ValueError, match="one tensor at a time, not 2"):
        group.broadcast([torch.ones(1), torch.ones(1)])
    with pytest.raises(ValueError, match="does not fit into"):
        group.all_gather_single(torch.ones(1), torch.ones(1, dtype=torch.int8))
    with pytest.raises(ValueError, match="are no 1 times"):
        group.all_gather_single(torch.ones(3), torch.ones(1))
    with pytest.raises(ValueError, match="are no 1 times"):
        group.reduce_scatter_single(torch.ones(3), torch.ones(1))
    with pytest.raises(ValueError, match="are not those of 2 rows"):
        group.all_to_all_single(torch.ones(2), torch.ones(2), [3], [3])


def test_a_message_of_another_dtype_is_an_error_of_its_receiver() -> None:
    def program(group: ProcessGroup) -> str:
        if group.rank() == 0:
            group.send([torch.ones(2)], 1).wait()
            return ""
        with pytest.raises(dist.DistBackendError) as e:
            group.recv([torch.ones(2, dtype=torch.int64)], 0).wait()
        return str(e.value)

    assert "torch.float32 [2], and does not fit into torch.int64 [2]" in run(program, ranks=2)[1]


def test_a_receive_may_be_waited_for_again() -> None:
    def program(group: ProcessGroup) -> Any:
        came = torch.zeros(1)
        if group.rank() == 0:
            work = group.recv([came], 1)
            with pytest.raises(dist.DistBackendError, match="still under way"):
                work.wait(timedelta(milliseconds=1))
            assert not work.is_completed()
        group.barrier().wait()
        if group.rank() == 0:
            work.wait()
        else:
            group.send([torch.ones(1)], 0).wait()
        return came.item()

    assert run(program, ranks=2)[0] == 1.0


def test_the_profiler_shows_ops_with_their_shapes() -> None:
    def program(group: ProcessGroup) -> Any:
        with torch.autograd.profiler.profile(record_shapes=True) as profile:
            group.allreduce([torch.ones(2, 3)], reducing(ReduceOp.SUM, waits=True)).wait()
        events = [each for each in profile.function_events if each.name == "pmesh:all_reduce"]
        return [each.input_shapes for each in events]

    assert run(program, ranks=1) == [[[[2, 3]]]]


def test_what_torch_asks_of_a_group() -> None:
    group = run(lambda group: group, ranks=1)[0]
    assert (group.name(), group.group_name, group.size()) == ("pmesh", "all", 1)
    group._set_group_name("other")
    group._set_group_desc("for a test")
    assert (group.group_name, group.group_desc) == ("other", "for a test")
    group._set_sequence_number_for_group()
    assert group._get_sequence_number_for_group() == 0
    assert group._get_backend(torch.device("cpu")) is group
    assert group.split_group([5]) is None
    group.abort()
    with pytest.raises(dist.DistBackendError, match="aborted"):
        group.barrier().wait()


def test_works_between_start_and_end_of_coalescing_are_one() -> None:
    both_have_called = threading.Barrier(2)

    def program(group: ProcessGroup) -> Any:
        x, came = torch.ones(1), torch.zeros(1)
        group._start_coalescing(torch.device("cpu"))
        group.allreduce([x])
        group.send([torch.ones(1)], 1 - group.rank())
        group.recv([came], 1 - group.rank())
        both_have_called.wait()  # else the other rank's calls begin threads that stay
        before = set(threading.enumerate())
        group._end_coalescing(torch.device("cpu")).wait()
        for thread in set(threading.enumerate()) - before:
            if thread.ident is not None:  # else the other rank is about to start it
                thread.join(20)
                assert not thread.is_alive()
        group._start_coalescing(torch.device("cpu"))
        assert group._end_coalescing(torch.device("cpu")).wait()
        return [x.item(), came.item()]

    assert run(program, ranks=2) == [[2.0, 1.0]] * 2


def test_objects_are_gathered_and_broadcast_without_pickle() -> None:
    def program(group: ProcessGroup) -> Any:
        rank = group.rank()
        everyone = pmesh.torch.all_gather_object({"rank": rank}, group)
        told = group.broadcast_object(["of", rank], 2)
        with pytest.raises(dist.DistBackendError, match="not data that MessagePack can say"):
            pmesh.torch.all_gather_object(len, group)
        return [everyone, told]

    assert run(program) == [[[{"rank": 0}, {"rank": 1}, {"rank": 2}], ["of", 2]]] * 3


def test_objects_are_for_a_group_of_the_backend() -> None:
    with pytest.raises(pmesh.UsageError, match="is for a group of the backend 'pmesh'"):
        pmesh.torch.all_gather_object(1, group=object())
    with pytest.raises(pmesh.UsageError, match="is for a group of the backend 'pmesh'"):
        pmesh.torch.broadcast_object(1, group=object())


def test_small_reductions_in_line_are_sent_together_and_large_ones_are_not() -> None:
    def program(group: ProcessGroup) -> list[float]:
        sizes = (3, 1024, 100_000, 5, 7, 8, *range(1, 12))
        xs = [torch.full((size,), float(size + group.rank())) for size in sizes]
        most = torch.full((4,), float(group.rank()))
        works = [group.allreduce([x], reducing(dist.ReduceOp.SUM)) for x in xs]
        works.append(group.allreduce([most], reducing(dist.ReduceOp.MAX)))
        for work in reversed(works):
            work.wait()
        assert all((x == x[0]).all() for x in xs)
        return [
            *(float(x[0]) - 3 * size for size, x in zip(sizes, xs, strict=True)),
            float(most[0]),
        ]

    assert run(program) == [[3.0] * 17 + [2.0]] * 3


def test_a_group_that_is_aborted_ends_what_it_has_sent() -> None:
    has_ended = threading.Event()

    def program(mesh: Mesh) -> None:
        group, total = group_of(mesh, end=mesh.close), reducing(dist.ReduceOp.SUM)
        if mesh.rank == 1:
            group.allreduce([torch.ones(3)], total).wait()
            assert has_ended.wait(PATIENCE_S)
            return
        may_begin, xs = threading.Event(), [torch.ones(3) for _ in range(4)]
        group._line.submit(lambda: may_begin.wait(PATIENCE_S))
        works = [group.allreduce([x], total) for x in xs]
        write = StagedTensor.write

        def write_and_abort(target: StagedTensor) -> None:
            write(target)
            if target.memory.data_ptr() == xs[0].data_ptr():
                group.abort()  # another thread may do so before the next one has its turn

        with mock.patch.object(StagedTensor, "write", write_and_abort):
            may_begin.set()
            works[0].wait()
        has_ended.set()
        with pytest.raises(MeshClosed):
            mesh.barrier()
        for work in works[1:]:
            with pytest.raises(dist.DistBackendError, match="the process group was aborted"):
                work.wait()

    SimulatedMesh(2).run(program)
