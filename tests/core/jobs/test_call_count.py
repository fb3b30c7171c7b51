"""O10: which calls a rank makes, and which it skips, after an error."""

from pmesh.core.jobs.call_count import CallCount


def make(count: CallCount, *, ops: int = 1, fails: bool = False) -> None:
    count.begin()
    for _ in range(ops):
        count.ops += 1
    if fails:
        count.failed()


def test_calls_that_succeed_are_not_compared() -> None:
    count = CallCount()
    for _ in range(3):
        make(count)
    assert (count.made, count.doubtful, count.why_skipped()) == (3, False, "")


def test_after_a_call_that_fails_in_an_op_the_ranks_compare_their_counts() -> None:
    count = CallCount()
    make(count, fails=True)
    assert count.doubtful
    count.begin()
    count.ops += 1  # in which the counts are compared
    count.compared(2)
    assert (count.doubtful, count.why_skipped()) == (False, "")


def test_a_rank_that_is_behind_skips_its_calls_up_to_where_the_others_are() -> None:
    count = CallCount()
    make(count, fails=True)
    count.begin()
    count.compared(4)
    skipped = []
    while why := count.why_skipped():
        skipped.append(why)
        count.failed()
        count.begin()
    assert len(skipped) == 2
    assert "this is call 2, and they go on together from call 4" in skipped[0]
    assert (count.made, count.doubtful) == (4, False)


def test_a_call_that_fails_before_its_first_op_counts_as_none() -> None:
    count = CallCount()
    make(count)
    make(count, ops=0, fails=True)
    assert (count.made, count.doubtful) == (1, False)


def test_counts_that_could_not_be_compared_are_compared_before_the_next_call() -> None:
    count = CallCount()
    make(count, fails=True)
    make(count, fails=True)
    assert (count.made, count.doubtful) == (2, True)


def test_a_sync_begins_the_count_anew() -> None:
    count = CallCount()
    make(count, fails=True)
    count.begin()
    count.compared(9)
    count.synced()
    count.begin()
    assert (count.made, count.doubtful, count.why_skipped()) == (1, False, "")
