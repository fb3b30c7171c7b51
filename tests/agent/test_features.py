"""What the agent tells a feature, and what it lets it serve."""

from collections.abc import Sequence

import pytest
from trio.testing import MockClock

from pmesh.agent import run
from pmesh.agent.features import AnyFeature, Feature, Kernel
from pmesh.core.values import Verdict
from pmesh.core.wire.channels import Channel, Message
from pmesh.core.wire.session import Refused, SessionMessage
from pmesh.errors import UsageError
from pmesh.features import make_features
from pmesh.ids import Member
from pmesh.net.sessions.sessions import Session
from tests.worlds.faults import Faults
from tests.worlds.trainer import until
from tests.worlds.village import Machine, village
from tests.worlds.village_ops import reduce_all


class Word(Message, frozen=True, tag=1):
    channel = 200
    text: str


class AskWord(SessionMessage, frozen=True, tag="ask_word"):
    text: str


class Diary(Feature[Word, AskWord]):
    channel = Channel[Word](Word.channel, Word)
    openings = (AskWord,)

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.entries: list[object] = []
        self.follows = self.polls = 0

    def receive(self, member: Member, message: Word) -> None:
        self.entries.append((member, message.text))

    async def serve(self, _: Session, request: AskWord) -> None:
        raise UsageError(f"nobody says {request.text}")

    async def run(self) -> None:
        self.entries.append("runs")

    def follow(self) -> None:
        self.follows += 1

    def poll(self) -> None:
        self.polls += 1

    def rank_is(self, pid: int, number: int) -> None:  # noqa: ARG002 - all are of this process
        self.entries.append(("rank", number))

    def op_completed(self, pid: int, *, syncs: bool) -> None:  # noqa: ARG002 - likewise
        self.entries.append(("op", syncs))

    def close(self) -> None:
        self.entries.append("closed")


@pytest.fixture(autouse=True)
def with_a_diary(faults: Faults) -> None:
    def all_and_a_diary(kernel: Kernel) -> Sequence[AnyFeature]:
        return (*make_features(kernel), Diary(kernel))

    faults.pretend(run, "make_features", all_and_a_diary)


def diary_of(machine: Machine) -> Diary:
    return machine.part(Diary)


async def test_a_feature_learns_of_ranks_ops_and_views_until_it_is_closed(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (machine,) = here.machines
        diary = diary_of(machine)
        follows = diary.follows
        trainers = await here.job(machine)
        assert diary.entries == ["runs", ("rank", 0)]
        await reduce_all(trainers)
        assert diary.entries[2:] == [("op", False)]
        assert diary.follows > follows
        polls = diary.polls
        await until(lambda: diary.polls > polls)
        await machine.stop()
        assert diary.entries[-1] == "closed"


async def test_features_of_two_agents_talk_on_their_channel(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = map(diary_of, here.machines)
        one.kernel.peers.reach.send(two.kernel.me, Word("hello"))
        await until(lambda: (one.kernel.me, "hello") in two.entries)


async def test_a_usage_error_of_a_feature_refuses_the_request(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        trainer = await here.trainer(here.machines[0])
        reply = await trainer.ask(AskWord("please"))  # type: ignore[arg-type] # of this feature
        assert reply == Refused(Verdict("UsageError", "nobody says please"))
