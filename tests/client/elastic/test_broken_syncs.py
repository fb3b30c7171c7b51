"""A transfer that breaks off, as one rank sees it: what it calls next, whatever it had come to."""

from typing import cast

import numpy as np
import pytest

from pmesh.client.elastic import sync
from pmesh.client.elastic.sync import Offer, run_sync
from pmesh.client.session.session import Done, TrainerSession
from pmesh.client.trees.state import Packed, pack
from pmesh.core.ops.reductions import WIRE_DTYPES, Values
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import World
from pmesh.errors import RankLost
from pmesh.ids import OpNumber, TrainerId
from tests.worlds.faults import Faults

CHUNK_BYTES = 256
THEIRS, OURS = (pack({"w": np.full(300, i, np.float32)}) for i in (1, 2))


class SessionWithLoss:
    """Of rank 2 among four; 0 and 1 have the state, and 1, which sends it, is lost."""

    def __init__(self, *, lost_in: str) -> None:
        self.world = world_of(0, 1, 2, 3)
        self.calls: list[str] = []
        self.offers: list[Offer] = []
        self._region: Values = np.empty(0)
        self._lost_in = lost_in

    def input_values(
        self, dtype: str, count: int, *, room_bytes: int, retained: bool = False
    ) -> Values:
        del room_bytes, retained
        self._region = np.zeros(count, WIRE_DTYPES[dtype])
        return self._region

    def run_op(self, call: Call, dtype: str, count: int, *, timeout_s: float) -> Done:
        del timeout_s
        self.calls.append(call.tree or call.kind)
        if call.tree == self._lost_in and len(self.world.trainers) == 4:
            self.world = world_of(0, 2, 3)
            raise RankLost("its root, rank 1, is lost")
        if call.kind == "sync":
            own = Offer.from_values(self._region.tolist())
            self.offers.append(own)
            holder, behind = offer_of(THEIRS), offer_of(OURS)
            if len(self.offers) > 1:
                arrived = 2 * CHUNK_BYTES
                behind = behind._replace(arriving=THEIRS.digest[0], arrived=arrived)
            given = {0: holder, 1: holder, 2: own, 3: behind}
            table = [value for t in self.world.trainers for value in given[t].to_values()]
            return Done(OpNumber(0), self.world, np.array(table))
        start = int(call.tree.removeprefix("sync "))
        region = np.zeros(count * 4, np.uint8)
        size = min(CHUNK_BYTES, THEIRS.nbytes - start)
        THEIRS.copy_to(region[:size], start)
        return Done(OpNumber(0), self.world, region.view(WIRE_DTYPES[dtype]))


def world_of(*trainers: int) -> World:
    ids = tuple(map(TrainerId, trainers))
    return World(ids.index(TrainerId(2)), ids, tuple(f"mac-{i}" for i in ids))


def offer_of(packed: Packed) -> Offer:
    return Offer(packed.digest, packed.nbytes, 0, veteran=False, raises_on_loss=False)


@pytest.mark.parametrize("ahead", [0, 1])
def test_all_ask_each_other_and_go_on_with_what_the_last_of_them_lacks(
    faults: Faults, ahead: int
) -> None:
    """I5: who was a chunk ahead is told of the failure when it calls the next one."""
    faults.limit(sync, "CHUNK_BYTES", CHUNK_BYTES)
    session = SessionWithLoss(lost_in=f"sync {(2 + ahead) * CHUNK_BYTES}")
    synced = run_sync(cast("TrainerSession", session), OURS, offer_of(OURS), timeout_s=1.0)
    assert synced.received is not None
    assert synced.received.tobytes() == b"".join(bytes(piece) for piece in THEIRS.pieces)
    broken = 4 + ahead
    assert session.calls[:broken] == ["sync", *(f"sync {256 * i}" for i in range(3 + ahead))]
    assert session.calls[broken : broken + 3] == ["sync", "sync 512", "sync 768"]
    assert session.offers[1].arrived == (2 + ahead) * CHUNK_BYTES
    assert session.offers[1].arriving == THEIRS.digest[0]
