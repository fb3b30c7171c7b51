"""What the attackers say is what it is meant to be, and figures are judged by their bars."""

from random import Random

import msgspec
import pytest
from zeroconf._protocol.incoming import DNSIncoming

from pmesh.core.identity import advertisement as adverts
from pmesh.core.identity.keys import AdvertisementKey
from pmesh.core.values import Primary, Roster, Seat, Trainer, View
from pmesh.core.wire.channels import encode
from pmesh.core.wire.views import Commit, Heartbeat, Propose
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId, Slot, TrainerId
from simulation.wire import AnyMessage
from tests.worlds.builders import unsigned
from tools.hostile.liar import TWISTS, Liar, Twist
from tools.hostile.packets import RECORDS, announce, invent
from tools.hostile.rows import ROWS
from tools.hostile.turns import Measured, Turn

KEY = AdvertisementKey(b"meshmesh", bytes(32))
ME, YOU = (Member(NodeId(bytes([n]) * 32), Incarnation(n)) for n in (1, 2))
EPOCH = Epoch(1, ME.node, ME.incarnation)
RESTING = Turn(ops_per_s=100, slowest_s=0.1, more_descriptors=1, more_mib=1, join_s=1, rest_s=1)


@pytest.fixture
def random() -> Random:
    return Random(1)  # noqa: S311 - the same each time


def view() -> View:
    """Both, with a job of one rank at each."""
    trainers = tuple(
        Trainer(TrainerId(n), member, Slot(1), unsigned(f"mac-{n}"))
        for n, member in enumerate((ME, YOU))
    )
    job = Roster(JobName("job"), EPOCH, 1, trainers, Primary(EPOCH, (ME, YOU)), TrainerId(2))
    seats = tuple(Seat(t.member, t.said, EPOCH, None) for t in trainers)
    return View(EPOCH, seats, (job,))


def beat() -> Heartbeat:
    return Heartbeat(EPOCH, EPOCH, flushed=False, acting=True, needs_epoch=False, heard={})


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


@pytest.mark.parametrize("twist", TWISTS.values(), ids=TWISTS)
def test_each_twist_makes_another_view_that_can_still_be_sent(twist: Twist) -> None:
    twisted = twist(view(), YOU)

    assert twisted != view()
    assert encode(Commit(twisted, ()))


def test_a_liar_proposes_before_it_commits_and_begins_when_it_has_seen_a_view(
    random: Random,
) -> None:
    liar = Liar(random)
    assert not [said for _ in range(50) for said in liar.lies(beat(), YOU)]
    liar.see(Commit(view(), ()))

    said: list[AnyMessage] = []
    while not any(isinstance(message, Commit) for message in said):
        said = list(liar.lies(beat(), YOU))

    proposal, commit = said
    assert isinstance(proposal, Propose)
    assert isinstance(commit, Commit)
    assert proposal.epoch == commit.view.epoch > EPOCH
    assert YOU in proposal.members
    assert liar.told > 0


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"ops_per_s": 80}, ["ratio"]),
        ({"slowest_s": 0.4}, ["slowest op"]),
        ({"more_descriptors": 21, "more_mib": 11}, ["descriptors", "memory"]),
        ({"join_s": 11, "rest_s": 6}, ["join", "at rest"]),
        ({"faults": ("an agent has died",)}, ["faults"]),
    ],
)
def test_a_flood_is_judged_by_each_figure_beside_its_control(
    changed: dict[str, object], missed: list[str]
) -> None:
    attack = msgspec.structs.replace(RESTING, **changed)

    figures = list(ROWS[0].judge(Measured([RESTING], [attack])))

    assert [figure.name for figure in figures if not figure.met] == missed


def test_each_attack_is_compared_with_its_own_control() -> None:
    slow, fast = (msgspec.structs.replace(RESTING, ops_per_s=ops) for ops in (50.0, 200.0))
    half = [msgspec.structs.replace(turn, ops_per_s=turn.ops_per_s / 2) for turn in (slow, fast)]

    assert Measured([slow, fast, slow], [*half, slow]).ratio == 0.5
