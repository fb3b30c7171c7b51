"""What a rank's machine says to the other copies of its job's store, beside the truth.

It goes behind what an honest agent has to say on the same stream (`pmesh.store.rules.pipe`), so it
arrives in order and is read as that agent's.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from random import Random
from typing import Any, get_args

import msgspec
from msgspec import inspect

from pmesh.core.wire.framing import frame
from pmesh.core.wire.stream import Part
from pmesh.store.rules.pipe import Pipe
from pmesh.store.wire import (
    MAX_COMMAND_BYTES,
    NO_COPY,
    Answered,
    Ask,
    CopyBegins,
    CopyEnds,
    Fetch,
    Get,
    GiveUp,
    Keys,
    Set,
    StoreMessage,
    decode_message_untrusted,
)
from tools.fuzz.liar import Liar
from tools.fuzz.parts import children, example

SHARE = 0.1  # of the turns in which the stream is looked at
MANY_KEYS, MANY_QUESTIONS, MANY_CALLS = 30_000, 1500, 30_000
HIGHEST = 2**62


STORE_KINDS = get_args(StoreMessage)


def new_store_liar(seed: int) -> Liar:
    """One that speaks to other copies."""
    return Liar(
        seed,
        STORE_KINDS,
        lambda m: decode_message_untrusted(msgspec.msgpack.encode(m)),
        room=MAX_COMMAND_BYTES,
    )


def highest(kind: type) -> Any:  # noqa: ANN401 - of that kind
    """A message of this kind whose numbers are as high as they may be."""
    return _with_numbers(kind, HIGHEST)


def lowest(kind: type) -> Any:  # noqa: ANN401 - of that kind
    return _with_numbers(kind, NO_COPY)


def _with_numbers(kind: type, number: int) -> Any:  # noqa: ANN401
    message = example(inspect.type_info(kind), Random(0))  # noqa: S311 - no secret
    numbers = {name: number for name, part in children(message) if isinstance(part, int)}
    return msgspec.structs.replace(message, **numbers)


def sequences(last: Answered) -> dict[str, Callable[[], list[Any]]]:
    """What is harmless once: of the calls of a rank to which this was the last answer."""
    trainer, call = last.trainer, last.call

    def ask(number: int, command: Any) -> Ask:  # noqa: ANN401 - any command
        return Ask(trainer, call + number, command)

    def set_many() -> list[Any]:
        return [ask(n, Set(f"key {n}", b"")) for n in range(1, MANY_KEYS)]

    def wait_many() -> list[Any]:
        return [ask(n, Get("never")) for n in range(1, MANY_CALLS)]

    return {
        "a copy at the highest position": lambda: [highest(CopyBegins), highest(CopyEnds)],
        "the highest numbers": lambda: [highest(k) for k in get_args(StoreMessage)],
        "a copy again and again": lambda: [highest(Fetch)] * 1000 + [lowest(Fetch)] * 1000,
        "many keys": lambda: [*set_many(), *[ask(n, Keys("")) for n in range(1, MANY_QUESTIONS)]],
        "many that wait": wait_many,
        "many that give up": lambda: [
            *wait_many(),
            *[GiveUp(trainer, call + n) for n in range(1, MANY_CALLS)],
        ],
    }


def lie_about_stores(
    liar: Liar,
    begun: Callable[[], bool],
    *,
    on: Callable[[Pipe], bool] = lambda _: True,
    only: str = "",
) -> None:
    """From now on, in all jobs of which a rank runs here.

    Args:
        liar: Decides what is said.
        begun: Whether it lies by now.
        on: Whether the stream is its own; all of the process, if nothing else is said.
        only: The one of `sequences` that it says; "" for all, and any messages.
    """
    parts, receive = Pipe.parts, Pipe.receive_untrusted
    last: list[Answered] = []

    @wraps(receive)
    def listen(pipe: Pipe, part: Part, *, now: float) -> Iterator[StoreMessage]:
        for message in receive(pipe, part, now=now):
            liar.hear(message)
            if isinstance(message, Answered) and on(pipe):
                last[:] = [message]
            yield message

    @wraps(parts)
    def say(pipe: Pipe, *, now: float) -> Iterator[Part]:
        stream = pipe._stream  # noqa: SLF001 - what is said next goes there
        if begun() and on(pipe) and last and stream.room > 0 and liar.dice.random() < SHARE:
            known = sequences(*last)
            choice = [known[only]] if only else [liar.anything, *known.values()]
            said = liar.dice.choice(choice)()
            stream.write(b"".join(frame(msgspec.msgpack.encode(message)) for message in said))
        return parts(pipe, now=now)

    setattr(Pipe, "receive_untrusted", listen)  # noqa: B010 - a type checker would not have it
    setattr(Pipe, "parts", say)  # noqa: B010
