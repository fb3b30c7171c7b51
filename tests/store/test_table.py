"""What each command does to the keys and values, beside the executable model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.store.rules.table import Table
from pmesh.store.wire import (
    KEY_OVERHEAD_BYTES,
    MAX_VALUE_BYTES,
    Add,
    Append,
    Check,
    Command,
    CompareSet,
    Delete,
    Get,
    Keys,
    Read,
    Set,
    Wait,
    Write,
)
from tests.worlds.linearizable import State, carry_out

KEY = st.sampled_from(["a", "b", "ba"])
VALUE = st.sampled_from([b"", b"1", b"20"])
WRITES = st.one_of(
    st.builds(Set, KEY, VALUE),
    st.builds(Add, st.just("n"), st.integers(-9, 9)),
    st.builds(CompareSet, KEY, VALUE, VALUE),
    st.builds(Append, KEY, VALUE),
    st.builds(Delete, KEY),
)
READS = st.one_of(
    st.builds(Get, KEY),
    st.builds(Wait, st.tuples(KEY, KEY)),
    st.builds(Check, st.tuples(KEY, KEY)),
    st.builds(Keys, st.sampled_from(["", "b", "c"])),
)


@given(st.lists(WRITES | READS))
def test_a_table_does_what_the_model_does(commands: list[Command]) -> None:
    table, state = Table(), State()
    for command in commands:
        expected = carry_out(state, command)
        if isinstance(command, Read):
            assert expected is None or table.read(command).value == expected[1]
        else:
            answer, changed = table.write(command)
            assert expected is not None
            assert answer.value == expected[1]
            assert changed or expected[0] == state
            state = expected[0]
    assert dict(state) == table.values
    sizes = (len(key) + len(value) + KEY_OVERHEAD_BYTES for key, value in state)
    assert table.nbytes == sum(sizes)


@pytest.mark.parametrize(
    ("held", "command", "text"),
    [
        (b"one", Add("k", 1), "key 'k' holds no number"),
        (b"9" * 5000, Add("k", 1), "key 'k' holds no number"),
        (b"%d" % (2**63 - 1), Add("k", 1), "beyond 64 bits"),
        (bytes(MAX_VALUE_BYTES), Append("k", b"x"), "a value has at most 1048576"),
        (b"", Set("k", bytes(800)), "the job's store is full: with key 'k' it would take"),
        (b"", CompareSet("k", b"", bytes(800)), "the job's store is full"),
        (b"", Set("other", bytes(500)), "the job's store is full"),
    ],
)
def test_what_can_not_be_done_says_why_and_changes_nothing(
    held: bytes, command: Write, text: str
) -> None:
    table = Table(most_bytes=700)
    table.put("k", held)
    before = table.nbytes
    answer, changed = table.write(command)
    assert text in answer.refused
    assert not changed
    assert (table.values, table.nbytes) == ({"k": held}, before)


def test_more_keys_than_one_answer_takes_are_asked_for_by_a_prefix() -> None:
    table = Table()
    for i in range(1100):
        table.put(f"{i:04}" + "k" * 1000, b"")
    text = "the keys of the job's store that begin with '' take more than 1048576 bytes"
    assert table.read(Keys("")).refused == f"{text}: name a longer prefix"
    assert len(table.read(Keys("00")).value) == 100  # type: ignore[arg-type]


def test_a_store_that_is_too_full_can_be_emptied() -> None:
    table = Table(most_bytes=300)
    table.put("k", bytes(500))
    assert table.write(Set("k", bytes(400)))[1]
    assert table.write(Delete("k"))[1]
    assert table.nbytes == 0
