"""Store messages, commands and answers as bytes."""

import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.errors import ProtocolError
from pmesh.store.wire import (
    MAX_COMMAND_BYTES,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_VALUE_BYTES,
    Answer,
    Command,
    CompareSet,
    Set,
    StoreMessage,
    Wait,
    decode_answer_untrusted,
    decode_command_untrusted,
    decode_message_untrusted,
    encode,
)
from tests.worlds.examples import examples
from tests.worlds.strategies import garbled, values_of

DECODERS: dict[Any, Any] = {
    **dict.fromkeys(typing.get_args(StoreMessage), decode_message_untrusted),
    **dict.fromkeys(typing.get_args(Command), decode_command_untrusted),
    Answer: decode_answer_untrusted,
}
ENCODED = st.sampled_from(list(DECODERS)).flatmap(values_of).map(encode)


@pytest.mark.parametrize("kind", DECODERS)
def test_everything_comes_back_from_its_bytes(kind: type[msgspec.Struct]) -> None:
    @examples(25)  # 21 kinds
    @given(values_of(kind))
    def comes_back(message: StoreMessage | Command | Answer) -> None:
        assert DECODERS[kind](encode(message)) == message

    comes_back()


@given(st.binary(max_size=200) | ENCODED | garbled(ENCODED))
def test_whatever_comes_is_understood_or_a_protocol_error(data: bytes) -> None:
    for decode in set(DECODERS.values()):
        try:
            decode(data)
        except ProtocolError as e:
            assert str(e).startswith("not of a store: ")  # noqa: PT017 - both ends are allowed


@pytest.mark.parametrize(
    "command",
    [
        Set("k" * (MAX_KEY_BYTES + 1), b""),
        Set("k", bytes(MAX_VALUE_BYTES + 1)),
        Wait(("k",) * (MAX_KEYS + 1)),
    ],
)
def test_commands_beyond_their_limits_are_refused(command: Command) -> None:
    with pytest.raises(ProtocolError):
        decode_command_untrusted(encode(command))


def test_the_largest_commands_are_not_too_long() -> None:
    largest = bytes(MAX_VALUE_BYTES)
    for command in (
        CompareSet("k" * MAX_KEY_BYTES, largest, largest),
        Wait(("k" * MAX_KEY_BYTES,) * MAX_KEYS),
    ):
        assert len(encode(command)) <= MAX_COMMAND_BYTES
