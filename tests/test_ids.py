import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.ids import Epoch, Incarnation, NodeId, node_from_text, node_text, short_node

NODES = st.binary(min_size=32, max_size=32).map(NodeId)


@given(NODES)
def test_a_node_id_comes_back_from_its_text(node: NodeId) -> None:
    assert node_from_text(node_text(node)) == node


@given(NODES)
def test_the_text_of_a_node_id_fits_a_dns_label(node: NodeId) -> None:
    text = node_text(node)
    assert len(text) == 52
    assert set(text) <= set(string.ascii_lowercase + "234567")


@given(NODES, NODES)
def test_different_nodes_have_different_texts(one: NodeId, other: NodeId) -> None:
    assert (one == other) == (node_text(one) == node_text(other))


@given(st.text(max_size=60))
def test_any_other_text_is_refused_with_a_value_error(text: str) -> None:
    try:
        node = node_from_text(text)
    except ValueError:
        return
    assert node_text(node) == text


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("a" * 51, id="a character is missing"),
        pytest.param("a" * 53, id="a character too many"),
        pytest.param("a" * 50, id="31 bytes"),
        pytest.param("a" * 51 + "A", id="upper case"),
        pytest.param("a" * 51 + "b", id="bits beyond the last byte"),
        pytest.param("a" * 51 + "1", id="no letter of base32"),
        pytest.param("a" * 52 + "====", id="padded"),
        pytest.param("ä" * 52, id="not ascii"),
    ],
)
def test_a_text_that_is_nearly_a_node_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - base64's own message is as good as ours
        node_from_text(text)


def test_a_short_node_is_where_the_long_text_begins() -> None:
    node = NodeId(bytes(range(32)))
    assert short_node(node) == node_text(node)[:8] == "aaaqeaye"


def test_epochs_are_ordered_by_counter_then_leader_then_incarnation() -> None:
    def epoch(counter: int, leader: bytes, incarnation: int) -> Epoch:
        return Epoch(counter, NodeId(leader * 32), Incarnation(incarnation))

    ordered = [epoch(1, b"z", 9), epoch(2, b"a", 9), epoch(2, b"b", 1), epoch(2, b"b", 2)]
    assert sorted([ordered[2], ordered[0], ordered[3], ordered[1]]) == ordered
