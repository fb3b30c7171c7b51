"""What the attackers say is what it is meant to be, and figures are judged by their bars."""

from random import Random

import msgspec
import pytest
from zeroconf._protocol.incoming import DNSIncoming

from pmesh.core.identity import advertisement as adverts
from pmesh.core.identity.keys import AdvertisementKey
from tools.hostile.packets import RECORDS, announce, invent
from tools.hostile.rows import ATTACKS
from tools.hostile.turns import AttackTurn, Pairs

KEY = AdvertisementKey(b"meshmesh", bytes(32))
RESTING = AttackTurn(
    ops_per_s=100, slowest_s=0.1, more_descriptors=1, more_mib=1, join_s=1, rest_s=1
)


@pytest.fixture
def random() -> Random:
    return Random(1)  # noqa: S311 - the same each time


def test_an_invented_machine_is_announced_and_withdrawn_in_one_packet_each(random: Random) -> None:
    machine = invent(random, KEY)

    for withdrawn in (False, True):
        read = DNSIncoming(announce(machine, withdrawn=withdrawn))
        answers = read.answers()
        assert read.valid
        assert len(answers) == RECORDS
        assert {answer.ttl == 0 for answer in answers} == {withdrawn}
    assert KEY.tag.hex().encode() in machine.entries.values()
    assert adverts.instance_name(machine.node) in {answer.name for answer in answers}


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"ops_per_s": 80}, ["ratio"]),
        ({"slowest_s": 0.4}, ["slowest op later by, s"]),
        ({"more_descriptors": 21, "more_mib": 11}, ["more descriptors", "more memory, MiB"]),
        ({"join_s": 11, "rest_s": 6}, ["join, s", "at rest again after, s"]),
    ],
)
def test_a_flood_is_judged_by_each_figure_beside_its_control(
    changed: dict[str, object], missed: list[str]
) -> None:
    attack = msgspec.structs.replace(RESTING, **changed)

    assert ATTACKS[0].missed(Pairs([RESTING], [attack]).facts) == missed


def test_what_goes_wrong_beside_an_attack_or_its_control_is_told() -> None:
    wrong = msgspec.structs.replace(RESTING, faults=("an agent has died",))

    assert Pairs([RESTING, wrong], [wrong]).faults == ["an agent has died"] * 2


def test_each_attack_is_compared_with_its_own_control() -> None:
    slow, fast = (msgspec.structs.replace(RESTING, ops_per_s=ops) for ops in (50.0, 200.0))
    half = [msgspec.structs.replace(turn, ops_per_s=turn.ops_per_s / 2) for turn in (slow, fast)]

    assert Pairs([slow, fast, slow], [*half, slow]).ratio == 0.5
