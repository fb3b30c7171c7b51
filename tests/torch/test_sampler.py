"""The batch sampler among ranks in threads, whose times are told."""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from threading import Event
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import pmesh
import pmesh.torch
from pmesh.client.elastic.place import Place
from pmesh.client.mesh import Mesh, order_of
from pmesh.client.session.session import TrainerSession
from pmesh.core.wire.trainer import StartOp
from pmesh.ids import TrainerId
from pmesh.testing import SimulatedMesh
from pmesh.torch.process_group import ProcessGroup
from pmesh.torch.ranks import WORLDS, BackwardLine, Elastic
from pmesh.torch.sampler import DistributedBatchSampler
from tests.torch.conftest import RankPrograms
from tests.torch.dealing import alone
from tests.torch.groups import group_of, reducing, run
from tests.worlds.faults import Faults
from tests.worlds.watched_agent import WatchedAgent, WatchedSession, run_ranks

ROWS = 70
SPEEDS = 1, 2, 4


class TimedGroup(ProcessGroup):
    """A group whose rank computes as long as its test says."""

    computed_s = 0.0


def each_rank(program: Callable[[TimedGroup], Any]) -> list[Any]:
    def timed(group: ProcessGroup) -> Any:
        group.__class__ = TimedGroup
        return program(cast("TimedGroup", group))

    return run(timed)


def train(group: TimedGroup, steps: int, *, ahead: int = 0, **options: Any) -> list[list[int]]:
    """Begin so many steps with batches of 70 rows; return what this rank had of each."""
    sampler = DistributedBatchSampler(range(10_000), ROWS, group=group, **options)
    loader, found = iter(sampler), list[list[int]]()
    for _ in range(ahead):
        found.append(next(loader))
    for step in range(steps):
        found.append(next(loader))
        scale = sampler.begin_step(len(found[step]))
        assert scale == pytest.approx(len(found[step]) * 3 / ROWS)
        group.computed_s += len(found[step]) / SPEEDS[group.rank()]
    return found


def is_whole(batches: list[list[list[int]]], epoch: int = 0) -> bool:
    """Whether the ranks' parts of each batch are the rows that it has by its number."""
    order = order_of(10_000, epoch=epoch, seed=0).tolist()
    whole = [sorted(itertools.chain(*parts)) for parts in zip(*batches, strict=False)]
    return whole == [sorted(order[i * ROWS :][:ROWS]) for i in range(len(whole))]


def test_a_rank_takes_as_many_rows_as_it_computes_in_the_time_of_the_others() -> None:
    batches = each_rank(lambda group: train(group, 12))
    assert is_whole(batches)
    assert [len(of_rank[0]) for of_rank in batches] == [24, 23, 23]
    assert [len(of_rank[-1]) for of_rank in batches] == [10, 20, 40]


def test_no_row_is_lost_where_data_loaders_are_ahead_of_the_training() -> None:
    batches = each_rank(lambda group: train(group, 12, ahead=3 * group.rank()))
    assert is_whole(batches)
    assert [len(of_rank[11]) for of_rank in batches] == [10, 20, 40]


def test_no_row_is_lost_after_an_epoch_that_was_broken_off() -> None:
    def program(group: TimedGroup) -> tuple[list[list[int]], list[list[int]]]:
        sampler = DistributedBatchSampler(range(10_000), ROWS, group=group)
        passes = list[list[list[int]]]()
        for steps in (3, 5):  # after three steps, new shares hold
            ahead = steps + 2 * group.rank()
            passes.append([*itertools.islice(sampler, ahead)])
            for batch in passes[-1][:steps]:
                sampler.begin_step(len(batch))
                group.computed_s += len(batch) / SPEEDS[group.rank()]
        return passes[0], passes[1]

    first, second = zip(*each_rank(program), strict=True)
    assert is_whole([*first])
    assert is_whole([*second], epoch=1)


def test_steps_count_though_each_is_an_epoch() -> None:
    def program(group: TimedGroup) -> int:
        sampler = DistributedBatchSampler(range(ROWS), ROWS, group=group)
        for _ in range(8):
            for batch in sampler:
                sampler.begin_step(len(batch))
                group.computed_s += len(batch) / SPEEDS[group.rank()]
        return len(batch)

    assert each_rank(program) == [10, 20, 40]


def test_shares_are_even_if_one_rank_wants_that() -> None:
    options = {0: {"shares": "even"}}
    batches = each_rank(lambda group: train(group, 8, **options.get(group.rank(), {})))
    assert is_whole(batches)
    assert [len(of_rank[-1]) for of_rank in batches] == [24, 23, 23]


def test_a_rank_takes_no_more_rows_than_fit_its_memory_from_the_first_batch_on() -> None:
    options = {2: {"max_rows": 5}}
    batches = each_rank(lambda group: train(group, 2, **options.get(group.rank(), {})))
    assert is_whole(batches)
    assert [len(part) for part in batches[2]] == [5, 5]


def test_each_pass_is_an_epoch_with_an_order_of_its_own() -> None:
    def program(group: TimedGroup) -> list[list[list[int]]]:
        sampler = DistributedBatchSampler(range(100), 30, group=group)
        assert sampler.sampler is sampler.batch_sampler is sampler
        passes = [[*sampler], [*sampler]]
        sampler.set_epoch(0)
        return [*passes, [*sampler]]

    first, second, again = zip(*each_rank(program), strict=True)
    assert first == again
    assert first != second
    for epoch in first, second:
        assert sorted(itertools.chain(*itertools.chain(*epoch))) == list(range(100))


@pytest.mark.parametrize(
    ("samples", "options", "sizes"),
    [
        (100, {}, [30, 30, 30, 10]),
        (100, {"drop_last": True}, [30, 30, 30]),
        (92, {}, [30, 30, 30]),  # two rows do not do for three ranks
        (2, {}, []),
    ],
)
def test_the_last_batch_has_a_row_for_each_rank_or_is_left_out(
    samples: int, options: dict[str, Any], sizes: list[int]
) -> None:
    def program(group: TimedGroup) -> list[list[int]]:
        sampler = DistributedBatchSampler(range(samples), 30, shuffle=False, group=group, **options)
        batches = [*sampler]
        assert len(batches) == len(sampler)
        return batches

    whole = [sorted(itertools.chain(*parts)) for parts in zip(*each_rank(program), strict=True)]
    assert list(map(len, whole)) == sizes
    assert list(itertools.chain(*whole)) == list(range(sum(sizes)))


def test_a_data_loader_takes_it_and_the_last_batch_has_its_own_scale() -> None:
    data = torch.arange(100)

    def program(group: TimedGroup) -> list[float]:
        sampler = DistributedBatchSampler(data, 60, seed=3, group=group)
        loader: DataLoader[torch.Tensor] = DataLoader(data, batch_sampler=sampler)
        assert len(loader) == 2
        return [
            float(batch.sum()) * sampler.begin_step(len(batch)) / len(batch) for batch in loader
        ]

    sums = [sum(parts) for parts in zip(*each_rank(program), strict=True)]
    rows = data[torch.from_numpy(order_of(100, epoch=0, seed=3).copy())].float()
    assert sums == pytest.approx([float(rows[:60].mean() * 3), float(rows[60:].mean() * 3)])


def test_status_shows_the_steps_and_the_share(agent: WatchedAgent) -> None:
    shown = dict[TrainerId, tuple[int, int]]()

    def note(session: WatchedSession, request: StartOp) -> None:
        shown[session.me] = request.step, request.share_percent

    agent.before_op = note

    def program(mesh: Mesh) -> TrainerId:
        group: Any = group_of(mesh)
        group.__class__ = TimedGroup
        train(group, 10)
        mesh.barrier()
        return mesh.trainers[mesh.rank]

    ranks = run_ranks(agent.home, 3, program)
    assert [shown[each] for each in ranks] == [(10, 14), (10, 29), (10, 57)]


def everywhere(**options: Any) -> dict[int, dict[str, Any]]:
    return dict.fromkeys(range(3), options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({0: {"seed": 1}}, r"rank 0: \[9, 6, True, 1, False\]; rank 1: \[9, 6, True, 0, False\]"),
        (everywhere(batch_size=2), "at least 3, one row for each, not 2"),
        (everywhere(max_rows=1), "a batch of 6 rows does not fit"),
        (everywhere(shares="odd"), "shares is"),
    ],
)
def test_what_the_ranks_cannot_do_is_an_error_on_all_of_them(
    options: dict[int, dict[str, Any]], says: str
) -> None:
    def program(group: TimedGroup) -> None:
        with pytest.raises(pmesh.UsageError, match=says):
            DistributedBatchSampler(
                range(9), **{"batch_size": 6, "group": group} | options.get(group.rank(), {})
            )

    each_rank(program)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_a_library_that_would_deal_the_batches_out_once_more_is_refused(
    programs: RankPrograms, library: str
) -> None:
    pytest.importorskip(library)
    folder = programs.folder / f"dealing-{library}-twice"
    folder.mkdir()
    assert programs.run("tests.torch.dealing", f"{library}_twice", str(folder)) == [0, 0, 0]


def test_a_step_without_rows_is_refused() -> None:
    def program(group: TimedGroup) -> None:
        sampler = DistributedBatchSampler(range(9), 6, group=group)
        with pytest.raises(pmesh.UsageError, match="at least one row on each rank, not 0"):
            sampler.begin_step(0)

    each_rank(program)


def test_an_elastic_job_has_a_mesh_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WORLDS, "elastic", object.__new__(Elastic))
    with pytest.raises(pmesh.UsageError, match=r"take mesh\.batch"):
        pmesh.torch.DistributedBatchSampler(range(9), 6)


@dataclass
class BesideCounter:
    """Counts the ops that a group calls, and those that end."""

    called: int = 0
    ended: int = 0

    def begin_beside(self, _: Place) -> None:
        self.called += 1

    def end_beside(self, _: Place) -> None:
        self.ended += 1


def test_the_ops_of_elastic_ddp_run_beside_what_the_rank_computes(faults: Faults) -> None:
    def program(mesh: Mesh) -> BesideCounter:
        counted = BesideCounter()
        faults.instead(Place, "begin_beside", counted.begin_beside)
        faults.instead(Place, "end_beside", counted.end_beside)
        line, gate = BackwardLine(mesh), Event()
        done = [line.submit(gate.wait), line.submit(lambda: 1 / 0)]
        assert counted == BesideCounter(2, 0)
        gate.set()
        assert done[0].result()
        with pytest.raises(ZeroDivisionError):
            done[1].result()
        line.end()
        return counted

    assert SimulatedMesh(1).run(program) == [BesideCounter(2, 2)]


def test_what_a_rank_computes_beside_its_ops_is_its_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TrainerSession, "own_s", 1.0)  # it takes all that follows for requests

    def program(mesh: Mesh) -> tuple[float, float]:
        group, line, gate = group_of(mesh), BackwardLine(mesh), Event()
        done = [line.submit(gate.wait)]
        now = time.monotonic()
        while time.monotonic() == now:
            pass
        done.append(line.submit(gate.wait))
        before = group.computed_s
        gate.set()
        assert all(each.result() for each in done)
        line.end()
        return before, group.computed_s

    ((before, after),) = SimulatedMesh(1).run(program)
    assert before == 1.0
    assert after > 1.0


def test_a_group_times_each_op_whoever_runs_it_and_however_it_ends(faults: Faults) -> None:
    counts = defaultdict[Place, BesideCounter](BesideCounter)
    faults.instead(Place, "begin_beside", lambda place: counts[place].begin_beside(place))
    faults.instead(Place, "end_beside", lambda place: counts[place].end_beside(place))

    def program(mesh: Mesh) -> None:
        group = group_of(mesh)
        group.allreduce([torch.ones(3)]).wait()
        group.allreduce([torch.ones(3)], reducing(dist.ReduceOp.SUM, waits=True)).wait()
        with pytest.raises(dist.DistBackendError):
            group.allreduce([torch.ones(3 + mesh.rank)]).wait()

    SimulatedMesh(2).run(program)
    assert [*counts.values()] == [BesideCounter(3, 3)] * 2


@pytest.fixture(scope="module")
def weights_of_one_process() -> dict[str, torch.Tensor]:
    return alone()


@pytest.mark.slow
@pytest.mark.parametrize("shares", ["even", "measured"])
@pytest.mark.parametrize(
    "library",
    [
        "plain",
        pytest.param(
            "resumed",
            marks=pytest.mark.skipif(not find_spec("transformers"), reason="transformers"),
        ),
        *(
            pytest.param(name, marks=pytest.mark.skipif(not find_spec(name), reason=name))
            for name in ("accelerate", "lightning", "transformers")
        ),
    ],
)
def test_the_weights_are_those_of_one_process_with_the_same_batches(
    programs: RankPrograms,
    weights_of_one_process: dict[str, torch.Tensor],
    library: str,
    shares: str,
) -> None:
    folder = programs.folder / f"dealing-{library}-{shares}"
    folder.mkdir()
    codes = programs.run("tests.torch.dealing", library, str(folder), PMESH_SHARES=shares)
    assert codes == [0, 0, 0]
    found = [torch.load(folder / f"rank-{rank}.pt") for rank in range(3)]
    ends = {"even": [30, 30, 30], "measured": [13, 26, 51]}
    assert [of_rank["rows"][-2] for of_rank in found] == ends[shares]
    for of_rank in found:
        for name, value in weights_of_one_process.items():
            assert of_rank["net"][name].sub(value).abs().max() < 1e-5
            assert of_rank["net"][name].equal(found[0]["net"][name])
