"""The exchange by which two machines with the same code come to have the same mesh key.

It is SPAKE2 (RFC 9382; the library `spake2` over Ed25519's group), whose shared secret HKDF turns
into three keys: each side proves by one that it knows the code, and the third seals the mesh key.
All three depend on the whole transcript: both machines with their ids, names and versions, the
number, and both elements. Whoever changes any of it has another key.

Whoever does not know the code can test one guess in an exchange, and learns from it, or from any
number of recorded ones, nothing about the code or the key.
"""

import hashlib
import hmac
from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pmesh.core.identity.keys import KEY_BYTES, MeshKey
from pmesh.core.wire.framing import GUEST_MAGIC, frame
from pmesh.errors import ProtocolError
from pmesh.invites.rules.codes import Code
from pmesh.invites.wire import (
    PROOF_BYTES,
    Element,
    InviterHalf,
    Knock,
    Party,
    Proof,
    SealedKey,
    encode_guest,
)

_LABEL: Final = b"pmesh invitation/1"
_NONCE: Final = bytes(12)  # each key seals one message
_NO_PROOF: Final = bytes(PROOF_BYTES)

Entropy = Callable[[int], bytes]
"""Returns so many random bytes, as `secrets.token_bytes`."""


class WrongCodeError(Exception):
    """The other machine has another code, or is none of ours."""


class _Keys(NamedTuple):
    inviter: bytes
    guest: bytes
    seal: bytes
    transcript: bytes


class Guest:
    """The machine that joins. Call its methods in their order, each once."""

    def __init__(self, code: Code, me: Party, *, entropy: Entropy) -> None:
        self._pake = _start(code, "guest", entropy)
        self.knock = Knock(me, code.number, self._pake.element)
        self._keys: _Keys | None = None

    def prove(self, offer: InviterHalf) -> Proof:
        """Check the offer's proof, and return ours.

        Raises:
            WrongCodeError: The inviter does not have the same code.
            ProtocolError: The offer's element is none.
        """
        secret = self._pake.finish_untrusted(offer.element)
        self._keys = _derive(secret, self.knock, offer)
        if not hmac.compare_digest(offer.proof, _proof(self._keys.inviter, self._keys)):
            raise WrongCodeError
        return Proof(_proof(self._keys.guest, self._keys))

    def open(self, key: SealedKey) -> MeshKey:
        """Return the mesh key. Raises ProtocolError if the inviter has not sealed it."""
        assert self._keys is not None  # noqa: S101 - the order of calls
        try:
            cipher = ChaCha20Poly1305(self._keys.seal)
            return MeshKey(cipher.decrypt(_NONCE, key.sealed, self._keys.transcript))
        except InvalidTag as e:
            raise ProtocolError("a mesh key that the inviter has not sealed") from e


class Inviter:
    """The machine that has shown the code. Call its methods in their order, each once."""

    def __init__(self, code: Code, me: Party, key: MeshKey, *, entropy: Entropy) -> None:
        self._code = code
        self._me = me
        self._key = key
        self._entropy = entropy
        self._keys: _Keys | None = None

    def offer(self, knock: Knock) -> InviterHalf:
        """Answer a knock. Raises ProtocolError if its element is none."""
        if knock.element is None:
            raise ProtocolError("a knock without an element")
        pake = _start(self._code, "inviter", self._entropy)
        secret = pake.finish_untrusted(knock.element)
        offer = InviterHalf(self._me, pake.element, _NO_PROOF)
        self._keys = _derive(secret, knock, offer)
        return msgspec.structs.replace(offer, proof=_proof(self._keys.inviter, self._keys))

    def seal(self, proof: Proof) -> SealedKey:
        """Return the mesh key, sealed. Raises WrongCodeError if the guest has another code."""
        assert self._keys is not None  # noqa: S101 - the order of calls
        if not hmac.compare_digest(proof.proof, _proof(self._keys.guest, self._keys)):
            raise WrongCodeError
        cipher = ChaCha20Poly1305(self._keys.seal)
        return SealedKey(cipher.encrypt(_NONCE, self._key, self._keys.transcript))


def _derive(secret: bytes, knock: Knock, offer: InviterHalf) -> _Keys:
    """Derive the keys; the offer's own proof is no part of what they depend on."""
    unproven = msgspec.structs.replace(offer, proof=_NO_PROOF)
    said = (_LABEL, GUEST_MAGIC, encode_guest(knock), encode_guest(unproven))
    transcript = hashlib.sha256(b"".join(map(frame, said))).digest()
    keys = HKDF(hashes.SHA256(), 3 * KEY_BYTES, salt=_LABEL, info=transcript).derive(secret)
    inviter, guest, seal = (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
    return _Keys(inviter, guest, seal, transcript)


def _proof(key: bytes, keys: _Keys) -> bytes:
    return hmac.digest(key, keys.transcript, hashlib.sha256)


class _Pake:
    """One side of SPAKE2: the seam to the library, which has no types."""

    def __init__(self, side: Any, errors: tuple[type[Exception], ...]) -> None:  # noqa: ANN401 - as above
        self._side = side
        self._errors = errors
        self.element: Element = cast("bytes", side.start())

    def finish_untrusted(self, element: Element) -> bytes:
        """Return the shared secret, 32 bytes. Raises ProtocolError for no element of the group."""
        try:
            return cast("bytes", self._side.finish(element))
        except self._errors as e:
            raise ProtocolError(f"not an element of SPAKE2: {type(e).__name__}") from e


def _start(code: Code, side: str, entropy: Entropy) -> _Pake:
    # An agent that invites nobody, and every other command, do without it: 50 ms.
    import spake2  # noqa: PLC0415 # pyright: ignore[reportMissingTypeStubs]
    from spake2 import ed25519_basic  # noqa: PLC0415 # pyright: ignore[reportMissingTypeStubs]

    kind = spake2.SPAKE2_A if side == "inviter" else spake2.SPAKE2_B
    # The machines' ids are not known yet; the transcript has them.
    pake = kind(code.text.encode(), idA=b"inviter", idB=b"guest", entropy_f=entropy)
    return _Pake(pake, (spake2.SPAKEError, ed25519_basic.NotOnCurve, ValueError))
