"""Flipped bits on lanes and links; `python -m tools run bits` tries 100,000."""

from random import Random

import numpy as np

from pmesh.core.wire.records import HEADER_BYTES, Opener
from tests.worlds.faults import Faults
from tools.chaos import bits
from tools.lab.campaign import CampaignRun

FLIPS = 1000


def test_every_flip_is_noticed_and_no_sum_is_wrong() -> None:
    tally = bits.run_bit_flips(CampaignRun(episodes=FLIPS, op_bytes=0, seed=1))

    assert tally.violations == []
    assert tally.ops_checked == sum(tally.facts.values()) == FLIPS
    assert tally.facts["by its seal"] > FLIPS / 2
    assert tally.facts["by TLS"] > 0


def test_what_is_not_flipped_adds_up() -> None:
    parts = np.arange(bits.RECORDS * bits.VALUES, dtype=np.float32).reshape(bits.RECORDS, -1)
    stream = bits.seal_stream(bytes(32), parts)

    sums, how = bits.add_up(bytes(32), bytes(stream), np.ones(bits.VALUES, np.float32))

    assert np.array_equal(sums, parts + 1)
    assert how == "NOT noticed"


def test_a_receiver_that_believes_everything_is_caught(faults: Faults) -> None:
    def believe(_: Opener, record: memoryview, into: bytearray) -> None:
        into[:] = record[HEADER_BYTES : HEADER_BYTES + len(into)]

    faults.instead(Opener, "open_untrusted", believe)

    said = bits.flip_on_lane(Random(1))  # noqa: S311 - repeats the flip

    assert said.startswith("NOT right")
