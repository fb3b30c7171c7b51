import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.ids import (
    Epoch,
    Incarnation,
    NodeId,
    node_from_text,
    node_text,
    short_node,
    tell_apart,
)

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


ONE, TWO, THREE = (NodeId(bytes([n]) * 32) for n in (1, 2, 3))
LIKE_OTHERS = st.sampled_from(
    ["mac", "studio", f"mac ({node_text(ONE)[:4]})", f"mac ({node_text(TWO)[:4]})", node_text(ONE)]
)


def test_machines_keep_names_that_nobody_else_has() -> None:
    assert tell_apart({ONE: "mac", TWO: "Studio, left"}) == {ONE: "mac", TWO: "Studio, left"}


def test_a_name_that_belongs_to_a_machine_that_is_away_is_not_given_to_another() -> None:
    assert tell_apart({TWO: "mac"}, {"mac": ONE}) == {TWO: f"mac ({node_text(TWO)[:4]})"}
    assert tell_apart({ONE: "mac"}, {"mac": ONE}) == {ONE: "mac"}


def test_who_says_the_name_that_another_gets_does_not_get_it() -> None:
    start = node_text(ONE)[:4]
    shown = tell_apart({ONE: "mac", TWO: "mac", THREE: f"mac ({start})"})
    assert shown[ONE] == node_text(ONE)
    assert shown[TWO] == f"mac ({node_text(TWO)[:4]})"
    assert shown[THREE] == f"mac ({start}) ({node_text(THREE)[:4]})"


@given(
    st.dictionaries(st.sampled_from([ONE, TWO, THREE]), LIKE_OTHERS),
    st.dictionaries(LIKE_OTHERS, st.sampled_from([ONE, TWO, THREE])),
)
def test_no_two_machines_are_called_the_same_and_none_by_a_name_of_another(
    said: dict[NodeId, str], owners: dict[str, NodeId]
) -> None:
    shown = tell_apart(said, owners)
    assert shown.keys() == said.keys()
    assert len(set(shown.values())) == len(shown)
    ids = {node_text(node): node for node in (ONE, TWO, THREE)}
    for node, name in shown.items():
        assert ids.get(name, node) == node
        assert name in ids or owners.get(name, node) == node
