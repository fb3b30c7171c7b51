"""Strangers and members that flood two machines which train; what only a quiet machine can show,
such as ops/s, is measured by `python -m tools run hostile`."""

import pytest

from tools.hostile.rows import ATTACKS
from tools.hostile.turns import run_turns
from tools.lab.net import clean

pytestmark = [pytest.mark.netns, pytest.mark.slow]
SECONDS = 2.0
ANYTHING_S = 10.0  # the member has its seat after 2


def test_a_flood_of_machines_that_do_not_exist_kills_nobody_and_takes_no_descriptors() -> None:
    clean()  # what a run that was killed has left
    row = next(row for row in ATTACKS if row.name == "mdns-300")

    (attack,) = run_turns(row.order(seconds=SECONDS), 1, controls=False).attacks

    assert attack.faults == ()
    assert attack.more_descriptors <= 20
    assert attack.join_s < 30.0, "the third machine never joined"


def test_a_member_that_sends_anything_takes_nothing_from_a_job_in_which_it_has_no_rank() -> None:
    clean()
    row = next(row for row in ATTACKS if row.name == "anything")

    (attack,) = run_turns(row.order(seconds=ANYTHING_S), 1, controls=False).attacks

    assert attack.faults == ()
    assert attack.more_descriptors <= row.most["more descriptors"]
    assert attack.more_mib <= row.most["more memory, MiB"]
