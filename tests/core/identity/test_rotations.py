"""Rotations of the mesh key: whoever hears of which, in any order, ends with the same one."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.identity.keys import MeshKey, NodeKey
from pmesh.core.identity.rotations import (
    MAX_ENTITLED,
    MAX_ROTATION_BYTES,
    Rotation,
    check_rotation_untrusted,
    sign_rotation,
    supersedes,
)
from pmesh.errors import ProtocolError
from pmesh.ids import MAX_COUNTER, NodeId

KEY, OTHER_KEY = NodeKey.from_seed(b"k" * 32), NodeKey.from_seed(b"o" * 32)
NEW = MeshKey(b"n" * 32)
SIGNED = sign_rotation(KEY, NEW, [KEY.node, OTHER_KEY.node], before=None)


def rotation(number: int, letter: str) -> Rotation:
    return Rotation(number, MeshKey(letter.encode() * 32), (), KEY.node, bytes(64))


ROTATIONS = st.builds(rotation, st.integers(1, 3), st.sampled_from("abc"))


def last_of(heard: Sequence[Rotation]) -> Rotation | None:
    ours: Rotation | None = None
    for each in heard:
        if supersedes(each, ours):
            ours = each
    return ours


@given(st.lists(ROTATIONS, max_size=6), st.randoms(use_true_random=False))
def test_all_agents_end_with_the_same_rotation_whatever_the_order(
    heard: list[Rotation], random: st.DataObject
) -> None:
    shuffled = heard * 2
    random.shuffle(shuffled)  # type: ignore[attr-defined] # a random.Random

    assert last_of(shuffled) == last_of(heard)


@given(ROTATIONS, ROTATIONS)
def test_of_two_that_differ_exactly_one_replaces_the_other(one: Rotation, two: Rotation) -> None:
    assert (one == two) != (supersedes(one, two) or supersedes(two, one))
    assert not (supersedes(one, two) and supersedes(two, one))
    assert supersedes(one, None)


def test_a_rotation_follows_the_one_before_and_wins() -> None:
    second = sign_rotation(OTHER_KEY, MeshKey(b"2" * 32), [KEY.node], before=SIGNED)

    assert (SIGNED.number, second.number) == (1, 2)
    assert supersedes(second, SIGNED)
    assert not supersedes(SIGNED, second)


def test_what_its_machine_has_signed_is_taken_and_its_key_is_in_no_log() -> None:
    check_rotation_untrusted(SIGNED)
    assert repr(SIGNED) == str(SIGNED) == "Rotation(number=1)"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"number": 2}, id="another number"),
        pytest.param({"key": MeshKey(b"x" * 32)}, id="another key"),
        pytest.param({"entitled": (KEY.node,)}, id="fewer members"),
        pytest.param({"by": OTHER_KEY.node}, id="by another machine"),
        pytest.param({"by": NodeId(bytes(32))}, id="by a node that is no key"),
        pytest.param({"signature": bytes(64)}, id="no signature"),
    ],
)
def test_what_its_machine_has_not_signed_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="has not signed"):
        check_rotation_untrusted(msgspec.structs.replace(SIGNED, **changes))


def test_numbers_that_a_member_has_used_up_are_an_error_with_a_name() -> None:
    last = msgspec.structs.replace(SIGNED, number=MAX_COUNTER)

    with pytest.raises(ValueError, match="used up the numbers"):
        sign_rotation(KEY, NEW, [], before=last)


def test_a_rotation_with_all_members_that_an_agent_keeps_has_room_in_a_message() -> None:
    nodes = [NodeId(number.to_bytes(32, "big")) for number in range(MAX_ENTITLED)]

    assert len(msgspec.msgpack.encode(sign_rotation(KEY, NEW, nodes, before=None))) < (
        MAX_ROTATION_BYTES
    )
