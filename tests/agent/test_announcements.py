from pmesh.agent.announcements import describe_change
from pmesh.core.views import Roster, Seat, Trainer, Verdict, View
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId, Rank, Slot

A, B, C = (Member(NodeId(bytes([i]) * 32), Incarnation(i)) for i in (1, 2, 3))
NAMES = {A: "studio", B: "mini (2)", C: "air"}


def view(*members: Member, counter: int = 1, rosters: tuple[Roster, ...] = ()) -> View:
    epoch = Epoch(counter, *A)
    seats = tuple(Seat(member, NAMES[member], epoch, None) for member in members)
    return View(epoch, seats, rosters)


def roster(*lost: Verdict, born: int = 2) -> Roster:
    trainers = (Trainer(A, Slot(0)), Trainer(B, Slot(0)))
    return Roster(
        JobName("digits"), Epoch(born, *A), 5, trainers, ("studio", "mini (2)"), lost=lost
    )


def test_who_joins_is_named_with_the_ring_and_its_leader() -> None:
    lines = list(describe_change(view(A), view(B, A, C), {}, me=A))
    assert lines == [
        "mini (2) joined",
        "air joined",
        "ring: mini (2) → studio (this machine) → air → mini (2); leader studio",
    ]


def test_who_is_gone_is_named_with_the_reason_that_is_known() -> None:
    before = view(A, B, C)
    assert list(describe_change(before, view(A), {B: "silent for 2.0 s"}, me=A)) == [
        "mini (2) is gone: silent for 2.0 s",
        "air is gone: the others no longer hear it",
        "alone: no other machine of this mesh is here",
    ]


def test_a_view_that_only_settles_ops_is_no_news() -> None:
    jobs = (roster(),)
    assert not list(describe_change(view(A, B, rosters=jobs), view(A, B, rosters=jobs), {}, me=A))


def test_jobs_begin_lose_ranks_and_end() -> None:
    lost = Verdict("RankLost", "rank 1 (mini (2)) is lost: its trainer died", (Rank(1),))
    idle, running = view(A, B), view(A, B, rosters=(roster(),))
    failed = view(A, B, rosters=(roster(lost),))
    again = view(A, B, rosters=(roster(born=7),))
    assert list(describe_change(idle, running, {}, me=A)) == ["job 'digits' begins with 2 ranks"]
    assert list(describe_change(running, failed, {}, me=A)) == [
        "job 'digits': rank 1 (mini (2)) is lost: its trainer died"
    ]
    assert list(describe_change(failed, again, {}, me=A)) == [
        "job 'digits' begins with 2 ranks",
        "job 'digits' has ended",
    ]
    assert list(describe_change(failed, idle, {}, me=A)) == ["job 'digits' has ended"]
