import collections
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.client.trees.arrays import digest, flatten


class LeftAndRight(NamedTuple):
    left: object
    right: object


TREES: st.SearchStrategy[Any] = st.recursive(
    st.integers(),
    lambda children: (
        st.lists(children)
        | st.dictionaries(st.text() | st.integers(), children)
        | st.tuples(children, children)
        | st.builds(LeftAndRight, children, children)
    ),
)


@given(TREES)
def test_a_tree_put_together_again_is_the_same_tree(tree: object) -> None:
    taken = flatten(tree)
    assert len(taken.paths) == len(taken.leaves)
    assert taken.rebuild(taken.leaves) == tree


@given(st.dictionaries(st.text(), st.integers()))
def test_the_order_of_insertion_does_not_matter(tree: dict[str, int]) -> None:
    reversed_tree = dict(reversed(tree.items()))
    assert flatten(tree).paths == flatten(reversed_tree).paths
    assert flatten(tree).leaves == flatten(reversed_tree).leaves


def test_containers_keep_their_types_attributes_and_order() -> None:
    ordered = collections.OrderedDict([("b", 1), ("a", 2)])
    vars(ordered)["metadata"] = "kept"  # as torch's state_dict does
    default: Any = collections.defaultdict(int, {"x": 3})
    tree = [ordered, default, LeftAndRight(4, (5,))]
    result: Any = flatten(tree).rebuild([20, 10, 30, 40, 50])
    assert list(result[0].items()) == [("b", 10), ("a", 20)]
    assert type(result[0]) is collections.OrderedDict
    assert vars(result[0])["metadata"] == "kept"
    assert result[1] == {"x": 30}
    assert result[1].default_factory is int
    assert result[2] == LeftAndRight(40, (50,))
    assert type(result[2]) is LeftAndRight
    assert tree == [ordered, default, LeftAndRight(4, (5,))]
    assert ordered["b"] == 1


def test_a_bare_leaf_has_no_path() -> None:
    assert flatten(7).is_bare
    assert flatten(7).rebuild([8]) == 8
    assert not flatten([7]).is_bare
    assert not flatten({}).is_bare
    assert flatten({}).rebuild([]) == {}


def test_paths_lead_through_dicts_lists_and_tuples() -> None:
    assert flatten({"layers": [{"w": 1}, (2, {3: 4})]}).paths == (
        "layers.0.w",
        "layers.1.0",
        "layers.1.1.3",
    )


@pytest.mark.parametrize("other", [["a", "c"], ["a"], ["ab"], ["b", "a"], []])
def test_digests_differ_where_lines_do(other: list[str]) -> None:
    assert digest(["a", "b"]) == digest(["a", "b"])
    assert digest(other) != digest(["a", "b"])
