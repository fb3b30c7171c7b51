"""What comes to an agent's door: a Hello that lies, guesses at codes, questions for the mesh key.

An agent must not give the mesh key to anybody here: `KeyGivenError` ends the liar, and is a
finding.
"""

import contextlib
from random import Random
from typing import get_args

import trio
from msgspec.structs import replace

from pmesh.core.identity.certificates import issue_credentials
from pmesh.core.identity.keys import MeshKey, NodeKey, namespace_tag
from pmesh.core.values import Removal
from pmesh.core.wire.framing import GUEST_MAGIC, RENEWAL_MAGIC
from pmesh.core.wire.link import PROTOCOL_VERSION, Hello
from pmesh.ids import NodeId
from pmesh.invites.agent import GuestStream
from pmesh.invites.rules.codes import MOST_NUMBER, draw_code
from pmesh.invites.rules.exchange import Guest
from pmesh.invites.wire import (
    MAX_GUEST_BYTES,
    AnyGuestMessage,
    KeyStored,
    Knock,
    Party,
    Proof,
    SealedKey,
    decode_guest_untrusted,
    encode_guest,
)
from pmesh.net.links.path import shake_hands
from pmesh.net.links.renewal import ask_for_rotation
from pmesh.net.links.tls import TlsContexts
from tools.fuzz.liar import Liar
from tools.fuzz.life import GONE, LiarsLife, hello_of

GREETED_BY = Hello
"""What `greet` lies about."""
GUEST_KINDS = get_args(AnyGuestMessage)
MANY_GREETINGS = 10
WAITS_S = 1.0
UNENCODABLE = (OverflowError, TypeError, ValueError, AttributeError)


class KeyGivenError(Exception):
    """An agent has given the mesh key to a machine that may not have it."""


def new_guest(seed: int = 0) -> Liar:
    """One that speaks to a machine that invites."""
    return Liar(
        seed,
        GUEST_KINDS,
        lambda message: decode_guest_untrusted(encode_guest(message)),
        room=MAX_GUEST_BYTES,
    )


def _new_key(dice: Random) -> NodeKey:
    return NodeKey.from_seed(dice.randbytes(32))


async def greet(life: LiarsLife) -> None:
    """Machines whose Hello is a lie, or says that a member has removed the receiver."""
    for _ in range(MANY_GREETINGS):
        key = _new_key(life.dice)
        hello = hello_of(key, life.hello.name)
        life.liar.learn(hello)
        lie = life.liar.changed(hello)
        if life.others and life.dice.random() < 0.2:  # noqa: PLR2004
            other = life.dice.choice(life.others).node
            lie = replace(hello, removal=Removal(other, 1, True, life.key.node, bytes(64)))  # noqa: FBT003
        contexts = TlsContexts.of(issue_credentials(life.mesh_keys[-1], key))
        with contextlib.suppress(*GONE, *UNENCODABLE), trio.move_on_after(WAITS_S):
            async with await life.knock() as stream:
                await shake_hands(
                    stream,
                    contexts=contexts,
                    server_side=False,
                    hello=lambda _: lie,  # noqa: B023 - called at once
                )


async def knock(life: LiarsLife) -> None:
    """As `pmesh join` without the code: each number, and exchanges that go astray."""
    party = Party(NodeId(life.some(32)), life.hello.name, PROTOCOL_VERSION)
    guess = Guest(draw_code(life.dice.randrange), party, entropy=life.some)
    for number in life.dice.sample(range(1, MOST_NUMBER + 1), MOST_NUMBER):
        with contextlib.suppress(*GONE):
            await _exchange(life, replace(guess.knock, number=number))


async def _exchange(life: LiarsLife, first: Knock) -> None:
    async with await life.knock() as stream:
        guest = GuestStream(stream)
        await guest.send(after=GUEST_MAGIC)
        for truth in (first, Proof(life.some(32)), KeyStored()):
            said = life.guest.say(truth)
            with contextlib.suppress(*UNENCODABLE):
                await guest.send(*said)
            with trio.move_on_after(WAITS_S):
                reply = await guest.receive()
                life.guest.learn(reply)
                if isinstance(reply, SealedKey):
                    raise KeyGivenError(f"a guest that does not know the code of {first.number}")


async def ask_for_key(life: LiarsLife) -> None:
    """As who has missed a rotation: with every key that there was, and with one of nobody."""
    for mesh_key in (*life.mesh_keys, MeshKey(life.some(32))):
        tag, key = namespace_tag(mesh_key), _new_key(life.dice)
        contexts = TlsContexts.of(issue_credentials(mesh_key, key))
        with contextlib.suppress(*GONE), trio.move_on_after(WAITS_S):
            await ask_for_rotation(
                await life.knock(), tag=tag, contexts=contexts, trusts=lambda _: True
            )
            raise KeyGivenError("a machine that was no member when the key changed")
        with contextlib.suppress(*GONE), trio.move_on_after(WAITS_S):
            async with await life.knock() as stream:
                await stream.send_all(RENEWAL_MAGIC + tag + life.some(life.dice.choice((1, 500))))
                await stream.receive_some(1)
