"""AEGIS-128L with tags of 32 bytes (draft-irtf-cfrg-aegis-aead), by libsodium, in buffers of ours.

PyNaCl's own functions for it return new bytes, so these call libsodium as PyNaCl does. Python's
lock is free meanwhile.
"""

import importlib
from typing import Final, Protocol, cast

from nacl.bindings import sodium_init

from pmesh.errors import ProtocolError

KEY_BYTES: Final = 16
NONCE_BYTES: Final = 16
TAG_BYTES: Final = 32


class _Pointer(Protocol):
    def __add__(self, nbytes: int) -> "_Pointer": ...
    def __int__(self) -> int: ...


class _Ffi(Protocol):
    NULL: _Pointer

    def from_buffer(self, buffer: bytes | bytearray | memoryview) -> _Pointer: ...
    def addressof(self, library: "_Sodium", function: str) -> _Pointer: ...
    def cast(self, c_type: str, pointer: _Pointer) -> _Pointer: ...


class _Sodium(Protocol):
    def crypto_aead_aegis128l_encrypt(self, *arguments: _Pointer | bytes | int) -> int: ...
    def crypto_aead_aegis128l_decrypt(self, *arguments: _Pointer | bytes | int) -> int: ...


class _Module(Protocol):
    ffi: _Ffi
    lib: _Sodium


_module = cast("_Module", importlib.import_module("nacl._sodium"))  # it has no types
_ffi, _sodium = _module.ffi, _module.lib
sodium_init()  # without it libsodium uses no AES instructions, and is 500 times slower


def _address(function: str) -> int:
    return int(_ffi.cast("uintptr_t", _ffi.addressof(_sodium, function)))


SEAL_ADDRESS: Final = _address("crypto_aead_aegis128l_encrypt")
"""Where libsodium's function begins, for C."""
OPEN_ADDRESS: Final = _address("crypto_aead_aegis128l_decrypt")
"""Where libsodium's function begins, for C."""


def seal(key: bytes, number: int, record: memoryview, clear: int, body: bytes | memoryview) -> None:
    """Encrypt `body` to the end of `record`, with a tag over it and over what is in front of it.

    Args:
        key: KEY_BYTES.
        number: the nonce, as a big-endian number; never used before with this key.
        record: `clear` bytes that only the tag protects, room for the body and for the tag.
        clear: how many bytes of the record stay in clear.
        body: only read.
    """
    if len(record) != clear + len(body) + TAG_BYTES:  # C would write on
        raise ValueError(f"{len(record)} bytes for {clear} in clear and {len(body)} to encrypt")
    nonce, null, begin = number.to_bytes(NONCE_BYTES, "big"), _ffi.NULL, _ffi.from_buffer(record)
    _sodium.crypto_aead_aegis128l_encrypt(
        begin + clear, null, _ffi.from_buffer(body), len(body), begin, clear, null, nonce, key
    )


def open_untrusted(
    key: bytes, number: int, record: memoryview, clear: int, into: bytearray | memoryview
) -> None:
    """Reverse `seal`: decrypt the end of `record` to `into`, which has exactly the body's size.

    Raises ProtocolError, with zeros in `into`, if it was not sealed so.
    """
    if len(record) != clear + len(into) + TAG_BYTES:
        raise ProtocolError(f"a record of {len(record)} bytes for a body of {len(into)}")
    nonce, null, begin = number.to_bytes(NONCE_BYTES, "big"), _ffi.NULL, _ffi.from_buffer(record)
    sealed_bytes = len(into) + TAG_BYTES
    if _sodium.crypto_aead_aegis128l_decrypt(
        _ffi.from_buffer(into), null, null, begin + clear, sealed_bytes, begin, clear, nonce, key
    ):
        raise ProtocolError("a record fails authentication")
