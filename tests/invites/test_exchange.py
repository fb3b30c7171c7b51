"""The exchange in memory: what each side learns, and what a third one does not."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.identity.keys import MeshKey, mesh_key_text
from pmesh.errors import ProtocolError
from pmesh.ids import NodeId
from pmesh.invites.rules.codes import Code
from pmesh.invites.rules.exchange import Guest, Inviter, WrongCodeError
from pmesh.invites.wire import (
    ELEMENT_BYTES,
    MAX_GUEST_BYTES,
    Declined,
    InviterHalf,
    KeyStored,
    Knock,
    Party,
    Proof,
    SealedKey,
    WrongCode,
    decode_guest_untrusted,
    encode_guest,
)
from tests.worlds.examples import examples

CODE = Code(7, "guitar", "lemon")
OTHER = Code(7, "guitar", "lend")
KEY = MeshKey(bytes(range(100, 132)))
ADA = Party(NodeId(b"a" * 32), "mac-1", 30)
BOB = Party(NodeId(b"b" * 32), "mac-2", 30)
_seeds = itertools.count()


def entropy() -> Callable[[int], bytes]:
    return random.Random(next(_seeds)).randbytes  # noqa: S311 - a test's, the same each time


def inviter(code: Code = CODE) -> Inviter:
    return Inviter(code, ADA, KEY, entropy=entropy())


def guest(code: Code = CODE) -> Guest:
    return Guest(code, BOB, entropy=entropy())


def test_two_machines_with_one_code_have_one_key_in_the_end() -> None:
    ada, bob = inviter(), guest()
    proof = bob.prove(ada.offer(bob.knock))
    assert bob.open(ada.seal(proof)) == KEY


def test_a_guest_with_another_code_sees_it_by_the_offer_and_sends_no_proof() -> None:
    bob = guest(OTHER)
    offer = inviter().offer(bob.knock)
    with pytest.raises(WrongCodeError):
        bob.prove(offer)


def test_a_guest_that_proves_another_code_gets_no_key() -> None:
    ada, bob, eve = inviter(), guest(OTHER), inviter(OTHER)
    ada.offer(bob.knock)
    proof = bob.prove(eve.offer(bob.knock))
    with pytest.raises(WrongCodeError):
        ada.seal(proof)


def test_a_recorded_exchange_has_nothing_of_the_code_or_the_key() -> None:
    ada, bob = inviter(), guest()
    offer = ada.offer(bob.knock)
    proof = bob.prove(offer)
    recorded = b"".join(map(encode_guest, (bob.knock, offer, proof, ada.seal(proof), KeyStored())))

    secret = [b"guitar", b"lemon", CODE.text.encode(), mesh_key_text(KEY).encode()]
    secret += [KEY[at : at + 4] for at in range(29)]
    assert [each for each in secret if each in recorded] == []


def test_no_two_exchanges_have_an_element_in_common_whatever_the_code() -> None:
    elements = {guest(code).knock.element for code in (CODE, OTHER) for _ in range(8)}
    assert len(elements) == 16


def test_the_replay_of_a_guests_messages_gets_no_key() -> None:
    ada, bob = inviter(), guest()
    proof = bob.prove(ada.offer(bob.knock))
    again = inviter()
    again.offer(bob.knock)
    with pytest.raises(WrongCodeError):
        again.seal(proof)


def test_the_replay_of_an_inviters_messages_brings_no_key() -> None:
    ada, bob, later = inviter(), guest(), guest()
    offer = ada.offer(bob.knock)
    with pytest.raises(WrongCodeError):
        later.prove(offer)


KNOCK_CHANGES: dict[str, dict[str, Any]] = {
    "name": {"party": Party(BOB.node, "mac-9", 30)},
    "node": {"party": Party(NodeId(b"c" * 32), "mac-2", 30)},
    "version": {"party": Party(BOB.node, "mac-2", 29)},
    "number": {"number": 8},
    "tag": {"tag": b"12345678"},
}


@pytest.mark.parametrize("change", KNOCK_CHANGES)
def test_a_knock_that_was_changed_on_the_way_gives_other_keys(change: str) -> None:
    ada, bob = inviter(), guest()
    offer = ada.offer(msgspec.structs.replace(bob.knock, **KNOCK_CHANGES[change]))
    with pytest.raises(WrongCodeError):
        bob.prove(offer)


@pytest.mark.parametrize(
    "party", [Party(ADA.node, "x", 30), Party(BOB.node, "mac-1", 30), Party(ADA.node, "mac-1", 31)]
)
def test_an_offer_that_was_changed_on_the_way_gives_other_keys(party: Party) -> None:
    bob = guest()
    offer = inviter().offer(bob.knock)
    with pytest.raises(WrongCodeError):
        bob.prove(msgspec.structs.replace(offer, party=party))


def test_a_sealed_key_that_was_changed_is_refused() -> None:
    ada, bob = inviter(), guest()
    sealed = ada.seal(bob.prove(ada.offer(bob.knock))).sealed
    with pytest.raises(ProtocolError, match="not sealed"):
        bob.open(SealedKey(sealed[:-1] + bytes([sealed[-1] ^ 1])))


def test_the_inviters_own_messages_are_no_guest() -> None:
    """A reflection: who sends back what it gets learns nothing."""
    ada = inviter()
    offer = ada.offer(guest().knock)
    with pytest.raises(ProtocolError, match="not an element"):
        inviter().offer(Knock(BOB, 7, offer.element))
    with pytest.raises(WrongCodeError):
        ada.seal(Proof(offer.proof))


@given(st.binary(min_size=ELEMENT_BYTES, max_size=ELEMENT_BYTES))
@examples(25)
def test_any_element_is_taken_or_refused_and_gets_no_key(element: bytes) -> None:
    for side in (b"A", b"B", b"S", element[:1]):
        ada = inviter()
        try:
            ada.offer(Knock(BOB, 7, side + element[1:]))
        except ProtocolError:
            continue
        with pytest.raises(WrongCodeError):
            ada.seal(Proof(bytes(32)))


@pytest.mark.parametrize("y", [0, 1, 2**255 - 19, 2**255 - 18, 2**255 - 20])
def test_elements_of_a_small_group_are_refused_or_bring_nothing(y: int) -> None:
    ada = inviter()
    try:
        ada.offer(Knock(BOB, 7, b"B" + y.to_bytes(32, "little")))
    except ProtocolError:
        return
    with pytest.raises(WrongCodeError):
        ada.seal(Proof(bytes(32)))


def test_a_knock_without_an_element_gets_no_offer() -> None:
    with pytest.raises(ProtocolError, match="without an element"):
        inviter().offer(Knock(BOB, 7, None))


LONGEST = Party(NodeId(b"x" * 32), "\U0001f34b" * 64, 2**16 - 1)
MESSAGES = [
    Knock(LONGEST, 2**16 - 1, b"x" * 33, b"12345678"),
    Knock(BOB, 7, None),
    InviterHalf(LONGEST, b"x" * 33, b"p" * 32),
    *(
        Declined(LONGEST, reason)
        for reason in ("version", "not invited", "member", "other mesh", "wrong code")
    ),
    Proof(b"p" * 32),
    WrongCode(),
    SealedKey(b"s" * 48),
    KeyStored(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_each_message_is_read_as_it_was_sent_and_fits_its_bound(message: Knock) -> None:
    data = encode_guest(message)
    assert decode_guest_untrusted(data) == message
    assert len(data) <= MAX_GUEST_BYTES


@given(st.binary(max_size=64) | st.sampled_from(MESSAGES).map(lambda m: encode_guest(m)[:-1]))
def test_anything_else_is_a_protocolerror(data: bytes) -> None:
    try:
        message = decode_guest_untrusted(data)
    except ProtocolError:
        return
    assert encode_guest(message)
