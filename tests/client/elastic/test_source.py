from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pmesh.client.elastic.sync import Offer, elect
from pmesh.core.wire.trainer import SYNC_VALUES
from pmesh.ids import TrainerId

INT64 = st.integers(-(2**63), 2**63 - 1)


def offer(
    state: int, step: int = 0, *, veteran: bool = False, raises_on_loss: bool = False
) -> Offer:
    return Offer((state, 0), 100, step, veteran, raises_on_loss)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[TrainerId], list[Offer]]:
    offers = draw(
        st.lists(
            st.builds(
                offer,
                st.integers(0, 2),
                st.integers(0, 2),
                veteran=st.booleans(),
                raises_on_loss=st.booleans(),
            ),
            min_size=1,
            max_size=6,
        )
    )
    numbers = st.lists(st.integers(0, 99), min_size=len(offers), max_size=len(offers), unique=True)
    return [TrainerId(number) for number in draw(numbers)], offers


@given(st.builds(Offer, st.tuples(INT64, INT64), INT64, INT64, st.booleans(), st.booleans()))
def test_an_offer_travels_as_int64_values(one: Offer) -> None:
    values = one.to_values()
    assert len(values) == SYNC_VALUES
    assert Offer.from_values(values) == one


@given(jobs())
def test_everyone_either_holds_the_best_state_or_receives_it(
    job: tuple[list[TrainerId], list[Offer]],
) -> None:
    trainers, offers = job
    plan = elect(trainers, offers)
    assert sorted(plan.holders + plan.receivers) == sorted(trainers)
    for trainer, theirs in zip(trainers, offers, strict=True):
        assert (theirs.digest == plan.best.digest) == (trainer in plan.holders)
        knew_better = theirs.veteran and theirs.step > 0
        assert (trainer in plan.corrected) == (knew_better and trainer in plan.receivers)
    assert plan.raises_on_loss == any(theirs.raises_on_loss for theirs in offers)


@given(jobs())
def test_nobody_has_a_better_state_than_the_best(
    job: tuple[list[TrainerId], list[Offer]],
) -> None:
    trainers, offers = job
    best = elect(trainers, offers).best
    for theirs in offers:
        assert (theirs.veteran, theirs.step) <= (best.veteran, best.step)
    first = next(o for o in offers if (o.veteran, o.step) == (best.veteran, best.step))
    assert first.digest == best.digest  # of equals, the lowest rank's


@given(jobs(), st.data())
def test_a_holder_sends_until_nobody_who_is_left_lacks_the_state(
    job: tuple[list[TrainerId], list[Offer]], data: st.DataObject
) -> None:
    trainers, offers = job
    plan = elect(trainers, offers)
    living: Sequence[TrainerId] = data.draw(st.permutations(trainers))
    living = living[: data.draw(st.integers(0, len(trainers)))]
    root = plan.root(living)
    assert root is None or (root in living and root in plan.holders)
    assert (root is None) == (not {*plan.holders} & {*living})
    receivers = {living[rank] for rank in plan.receivers_among(living)}
    assert receivers == {*plan.receivers} & {*living}
    assert plan.is_settled(living) == (not receivers)


@given(jobs(), st.data())
def test_the_bytes_go_over_as_few_edges_of_the_ring_as_they_can(
    job: tuple[list[TrainerId], list[Offer]], data: st.DataObject
) -> None:
    trainers, offers = job
    plan = elect(trainers, offers)
    ring: Sequence[TrainerId] = data.draw(st.permutations(trainers))
    size = len(ring)

    def edges(root: TrainerId) -> int:
        """Along the ring from the root until all who lack the state have been reached."""
        behind, lacking, count = ring.index(root), set(plan.receivers), 0
        while lacking:
            count += 1
            lacking.discard(ring[(behind + count) % size])
        return count

    root = plan.root(ring)
    assert root is not None
    assert edges(root) == min(map(edges, plan.holders))


def test_a_newcomer_never_overrules_the_job_however_far_it_came_elsewhere() -> None:
    trainers = [TrainerId(0), TrainerId(1)]
    plan = elect(trainers, [offer(1, step=3, veteran=True), offer(2, step=99)])
    assert plan.best == offer(1, step=3, veteran=True)
    assert plan.receivers == (1,)


def test_when_the_whole_job_begins_anew_the_furthest_state_wins() -> None:
    trainers = [TrainerId(0), TrainerId(1), TrainerId(2)]
    plan = elect(trainers, [offer(1), offer(2, step=50), offer(3, step=49)])
    assert (plan.holders, plan.receivers, plan.corrected) == ((1,), (0, 2), ())
