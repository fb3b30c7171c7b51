"""Lists of removals: whoever tells whom what, in any order, all end with the same list."""

from collections.abc import Sequence
from functools import reduce

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.identity.keys import NodeKey
from pmesh.core.identity.removals import (
    MAX_REMOVALS,
    Removals,
    check_removal_untrusted,
    merge,
    newer,
    sign_removal,
)
from pmesh.core.values import Removal
from pmesh.errors import ProtocolError
from pmesh.ids import MAX_COUNTER, NodeId

KEY, OTHER_KEY = NodeKey.from_seed(b"k" * 32), NodeKey.from_seed(b"o" * 32)
THIRD = NodeKey.from_seed(b"t" * 32).node
SIGNED = sign_removal(KEY, THIRD, {}, out=True)


def node(number: int) -> NodeId:
    return NodeId(number.to_bytes(32, "big"))


def entry(about: int, number: int, *, out: bool = True, by: int = 99) -> Removal:
    return Removal(node(about), number, out, node(by), bytes(64))


ENTRIES = st.builds(
    entry, st.integers(0, 3), st.integers(1, 4), out=st.booleans(), by=st.integers(90, 92)
)
MANY = st.builds(
    lambda first, count, number: [entry(first + i, number) for i in range(count)],
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(1, 3),
)
LISTS = st.lists(ENTRIES, max_size=8) | MANY


def listed(entries: Sequence[Removal]) -> dict[NodeId, Removal]:
    return merge({}, entries)


@given(LISTS, LISTS, LISTS)
def test_a_merge_is_commutative_associative_and_idempotent(
    a: list[Removal], b: list[Removal], c: list[Removal]
) -> None:
    one, two, three = map(listed, (a, b, c))

    both = merge(one, two.values())
    assert both == merge(two, one.values())
    assert merge(both, three.values()) == merge(one, merge(two, three.values()).values())
    assert merge(both, both.values()) == both


@given(st.lists(ENTRIES, max_size=12), st.randoms())
def test_the_order_in_which_entries_come_does_not_matter(
    entries: list[Removal], random: st.DataObject
) -> None:
    def one_by_one(order: Sequence[Removal]) -> Removals:
        return reduce(lambda ours, each: merge(ours, [each]), order, dict[NodeId, Removal]())

    shuffled = list(entries)
    random.shuffle(shuffled)  # type: ignore[attr-defined] # a random.Random

    assert one_by_one(entries) == one_by_one(shuffled) == listed(entries)


@given(LISTS, LISTS)
def test_what_is_not_newer_changes_nothing_and_a_list_is_bounded(
    a: list[Removal], b: list[Removal]
) -> None:
    ours = listed(a)
    news = newer(ours, b)

    assert merge(ours, [each for each in b if each not in news]) == ours
    assert merge(ours, news) == merge(ours, b)
    assert len(merge(ours, b)) <= MAX_REMOVALS


def test_the_latest_word_about_a_machine_counts() -> None:
    out = sign_removal(KEY, THIRD, {}, out=True)
    back = sign_removal(OTHER_KEY, THIRD, listed([out]), out=False)
    out_again = sign_removal(KEY, THIRD, listed([out, back]), out=True)

    assert [each.number for each in (out, back, out_again)] == [1, 2, 3]
    assert listed([out_again, out, back]) == {THIRD: out_again}


def test_of_two_words_at_the_same_time_the_removal_counts() -> None:
    out, back = entry(1, 5, out=True, by=90), entry(1, 5, out=False, by=91)

    assert listed([out, back]) == listed([back, out]) == {node(1): out}


def test_a_removal_of_today_has_room_in_a_list_that_somebody_has_filled() -> None:
    full = listed([entry(i, 7) for i in range(MAX_REMOVALS)])

    new = sign_removal(KEY, THIRD, full, out=True)

    assert merge(full, [new])[THIRD] == new
    assert len(merge(full, [new])) == MAX_REMOVALS


def test_a_list_that_somebody_has_filled_with_the_highest_numbers_has_room_for_our_own_word() -> (
    None
):
    full = listed([entry(i, MAX_COUNTER, by=2**256 - 1 - i) for i in range(MAX_REMOVALS)])

    new = sign_removal(KEY, THIRD, full, out=True)

    assert THIRD not in merge(full, [new])
    assert merge(full, [new], me=KEY.node)[THIRD] == new
    assert len(merge(full, [new], me=KEY.node)) == MAX_REMOVALS


def test_who_has_let_itself_in_with_the_highest_number_can_be_removed_all_the_same() -> None:
    ours = listed([Removal(THIRD, MAX_COUNTER, False, OTHER_KEY.node, bytes(64))])  # noqa: FBT003

    new = sign_removal(KEY, THIRD, ours, out=True)

    assert merge(ours, [new])[THIRD] == new


def test_a_machine_says_nothing_of_itself() -> None:
    with pytest.raises(ValueError, match="can't remove itself"):
        sign_removal(KEY, KEY.node, {}, out=False)


def test_numbers_that_a_member_has_used_up_are_an_error_with_a_name() -> None:
    ours = {THIRD: Removal(THIRD, MAX_COUNTER, True, KEY.node, bytes(64))}  # noqa: FBT003

    with pytest.raises(ValueError, match="used up the numbers"):
        sign_removal(KEY, THIRD, ours, out=False)


def test_what_a_member_has_signed_is_taken() -> None:
    check_removal_untrusted(SIGNED)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"node": OTHER_KEY.node}, id="about another machine"),
        pytest.param({"number": 2}, id="another number"),
        pytest.param({"out": False}, id="the opposite"),
        pytest.param({"by": OTHER_KEY.node}, id="by another machine"),
        pytest.param({"by": NodeId(bytes(32))}, id="by a node that is no key"),
        pytest.param({"signature": bytes(64)}, id="no signature"),
    ],
)
def test_what_nobody_has_signed_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="no other machine has signed"):
        check_removal_untrusted(msgspec.structs.replace(SIGNED, **changes))


def test_nobody_undoes_their_own_removal() -> None:
    own = msgspec.structs.replace(SIGNED, node=KEY.node)

    with pytest.raises(ProtocolError, match="no other machine has signed"):
        check_removal_untrusted(own)
