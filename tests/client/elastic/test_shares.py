"""The shares of ranks of unequal speed: simulated clusters, and a mesh whose ranks have clocks."""

import itertools
import random
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

import pmesh
from pmesh.client.elastic.shares import Shares
from pmesh.client.mesh import order_of
from pmesh.core.wire.trainer import World
from pmesh.ids import TrainerId
from tests.worlds.watched_agent import WatchedAgent, run_ranks

ROWS = 140


class RanksWithSpeeds:
    """Ranks that compute so many rows a second, with noise."""

    def __init__(self, speeds: Sequence[float], *, noise: float, seed: int = 0) -> None:
        self.speeds = list(speeds)
        self._noise = noise
        self._dice = random.Random(seed)  # noqa: S311 - no secret
        self._shares = [Shares() for _ in speeds]
        self._own_s = [0.0] * len(speeds)
        self.counts = list[tuple[int, ...]]()

    def step(self) -> float:
        """Take a step; return its speed over that of the best shares there could be."""
        trainers = tuple(map(TrainerId, range(len(self.speeds))))
        worlds = [World(rank, trainers, ("mac",) * len(trainers)) for rank in trainers]
        dealt = [s.deal(ROWS, world) for s, world in zip(self._shares, worlds, strict=True)]
        counts = tuple(map(len, dealt))
        for rank, share in enumerate(self._shares):
            varies = max(0.1, self._dice.gauss(1, self._noise))
            self._own_s[rank] += counts[rank] / self.speeds[rank] * varies
            share.end_step(self._own_s[rank])
        told = {t: s.standing(w) for t, s, w in zip(trainers, self._shares, worlds, strict=True)}
        for share, own_s in zip(self._shares, self._own_s, strict=True):
            share.agree(told)
            share.begin_step(own_s)
        self.counts.append(counts)
        took_s = max(count / speed for count, speed in zip(counts, self.speeds, strict=True))
        return ROWS / sum(self.speeds) / took_s

    def enter(self, speed: float) -> None:
        self.speeds.append(speed)
        self._shares.append(Shares())
        self._own_s.append(0.0)

    @property
    def changes(self) -> int:
        return sum(before != after for before, after in itertools.pairwise(self.counts))


@pytest.mark.parametrize("seed", range(10))
def test_unequal_ranks_are_soon_as_fast_as_all_together(seed: int) -> None:
    cluster = RanksWithSpeeds([1, 2, 4], noise=0.03, seed=seed)
    even = cluster.step()
    assert even == pytest.approx(3 / 7, abs=0.01)
    speeds = [cluster.step() for _ in range(100)]
    assert np.mean(speeds[10:]) >= 0.95
    assert cluster.changes <= 4


@pytest.mark.parametrize("seed", range(10))
def test_one_that_is_throttled_has_fewer_rows_within_ten_steps(seed: int) -> None:
    cluster = RanksWithSpeeds([1, 2, 4], noise=0.03, seed=seed)
    for _ in range(100):
        cluster.step()
    cluster.speeds[2] = 1
    speeds = [cluster.step() for _ in range(60)]
    assert np.mean(speeds[10:]) >= 0.9


@pytest.mark.parametrize("seed", range(10))
def test_noise_does_not_make_the_shares_swing(seed: int) -> None:
    cluster = RanksWithSpeeds([1, 2, 4], noise=0.2, seed=seed)
    for _ in range(500):
        cluster.step()
    assert cluster.changes <= 6
    assert np.ptp(cluster.counts[100:], axis=0).max() <= 0.25 * ROWS


def test_equal_ranks_keep_even_shares() -> None:
    cluster = RanksWithSpeeds([3, 3, 3], noise=0.1)
    for _ in range(300):
        cluster.step()
    assert set(cluster.counts) == {(47, 47, 46)}


def test_a_newcomer_takes_part_at_once_and_then_by_its_speed() -> None:
    cluster = RanksWithSpeeds([1, 2, 4], noise=0.01)
    for _ in range(20):
        cluster.step()
    cluster.enter(8)
    cluster.step()
    entered = cluster.step()
    assert min(cluster.counts[-1]) > 0
    later = [cluster.step() for _ in range(20)][-1]
    assert entered < 0.9
    assert later > 0.95


class RankClock(threading.local):
    """A clock for each rank, which is a thread."""

    now = 0.0


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> RankClock:
    clocks = RankClock()
    clock = SimpleNamespace(monotonic=lambda: clocks.now)
    monkeypatch.setattr("pmesh.client.session.session.time", clock)
    return clocks


def test_a_mesh_deals_rows_by_the_time_that_its_ranks_compute(
    agent: WatchedAgent, clocks: RankClock
) -> None:
    def program(mesh: pmesh.Mesh) -> tuple[list[int], list[int]]:
        slowness, counts, taken = 1.0 + 2 * mesh.rank, list[int](), list[int]()
        for step in range(8):
            mesh.sync([step])
            mine = mesh.batch(100, 40, position=40 * (step % 3))
            clocks.now += slowness * len(mine)
            mesh.average_gradients(np.ones(2), weight=len(mine))
            counts.append(len(mine))
            taken += mine.tolist() if step in range(3) else []
        return counts, taken

    (fast, some), (slow, others) = run_ranks(agent.home, 2, program)
    assert fast[0] == slow[0] == 20
    assert (fast[-1], slow[-1]) == (30, 10)
    assert sorted(some + others) == sorted(order_of(100, epoch=0, seed=0).tolist())


def test_even_shares_are_even_however_slow_a_rank_is(
    agent: WatchedAgent, clocks: RankClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMESH_SHARES", "even")

    def program(mesh: pmesh.Mesh) -> set[int]:
        counts = set[int]()
        for step in range(6):
            mesh.sync([step])
            counts.add(len(mesh.share(40)))
            clocks.now += 1.0 + mesh.rank
        return counts

    assert run_ranks(agent.home, 2, program) == [{20}, {20}]


def test_limits_of_memory_hold_from_the_first_sync_on(agent: WatchedAgent) -> None:
    def train(mesh: pmesh.Mesh) -> None:
        mesh.sync([0])
        assert len(mesh.share(8)) == 8
        with pytest.raises(pmesh.UsageError, match="9 rows does not fit"):
            mesh.share(9)

    with pmesh.connect("job", home=agent.home, max_rows=8) as mesh:
        train(mesh)


def test_what_can_not_be_is_named(agent: WatchedAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pmesh.UsageError, match="shares is 'measured' or 'even', not 'odd'"):
        pmesh.connect("job", home=agent.home, shares="odd")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    with pytest.raises(pmesh.UsageError, match=r"max_rows is at least 1 and .*, not 0"):
        pmesh.connect("job", home=agent.home, max_rows=0)
    monkeypatch.setenv("PMESH_SHARES", "odd")
    with pytest.raises(pmesh.UsageError, match="PMESH_SHARES is 'measured' or 'even', not 'odd'"):
        pmesh.connect("job", home=agent.home)
    monkeypatch.delenv("PMESH_SHARES")
    with pmesh.connect("job", home=agent.home) as mesh:
        with pytest.raises(pmesh.UsageError, match=r"at least 0 .* rows, not -1"):
            mesh.share(-1)
        with pytest.raises(pmesh.UsageError, match="batch_size is at least 1, not 0"):
            mesh.batch(10, 0)
