"""AEGIS-128L with tags of 32 bytes (draft-irtf-cfrg-aegis-aead), in buffers of ours.

On Linux it is libsodium's, from PyNaCl; on macOS libaegis's, from pyaegis, since PyNaCl's wheels
for macOS have no AES instructions. Both give the same bytes. The packages' own functions return
new bytes, so these call the C below them. Python's lock is free meanwhile.
"""

import importlib
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple, Protocol, cast

from nacl.bindings import sodium_init

from pmesh.errors import ProtocolError

KEY_BYTES: Final = 16
NONCE_BYTES: Final = 16
TAG_BYTES: Final = 32


class Library(IntEnum):
    """Whose functions they are: C must know it, since their arguments differ."""

    LIBSODIUM = 0
    LIBAEGIS = 1


class _Pointer(Protocol):
    def __add__(self, nbytes: int) -> "_Pointer": ...
    def __int__(self) -> int: ...


class _Ffi(Protocol):
    NULL: _Pointer

    def from_buffer(self, buffer: bytes | bytearray | memoryview) -> _Pointer: ...
    def addressof(self, library: object, function: str) -> _Pointer: ...
    def cast(self, c_type: str, pointer: _Pointer) -> _Pointer: ...


class _Extension(Protocol):
    ffi: _Ffi
    lib: object


class Cipher(NamedTuple):
    """The functions of one library."""

    library: Library
    ffi: _Ffi
    encrypt: Callable[..., int]
    decrypt: Callable[..., int]
    seal_address: int
    open_address: int

    def seal(
        self, key: bytes, number: int, record: memoryview, clear: int, body: bytes | memoryview
    ) -> None:
        """Encrypt `body` to the end of `record`, with a tag over it and over what is before it.

        Args:
            key: KEY_BYTES.
            number: the nonce, as a big-endian number; never used before with this key.
            record: `clear` bytes that only the tag protects, room for the body and for the tag.
            clear: how many bytes of the record stay in clear.
            body: only read.
        """
        if len(record) != clear + len(body) + TAG_BYTES:  # C would write on
            raise ValueError(f"{len(record)} bytes for {clear} in clear and {len(body)} to encrypt")
        nonce, begin = number.to_bytes(NONCE_BYTES, "big"), self.ffi.from_buffer(record)
        target, source, size = begin + clear, self.ffi.from_buffer(body), len(body)
        if self.library is Library.LIBAEGIS:
            self.encrypt(target, TAG_BYTES, source, size, begin, clear, nonce, key)
        else:
            null = self.ffi.NULL
            self.encrypt(target, null, source, size, begin, clear, null, nonce, key)

    def open_untrusted(
        self, key: bytes, number: int, record: memoryview, clear: int, into: bytearray | memoryview
    ) -> None:
        """Reverse `seal`: decrypt the end of `record` to `into`, which has exactly the body's size.

        Raises ProtocolError, with zeros in `into`, if it was not sealed so.
        """
        if len(record) != clear + len(into) + TAG_BYTES:
            raise ProtocolError(f"a record of {len(record)} bytes for a body of {len(into)}")
        nonce, begin = number.to_bytes(NONCE_BYTES, "big"), self.ffi.from_buffer(record)
        target, source, size = self.ffi.from_buffer(into), begin + clear, len(into) + TAG_BYTES
        if self.library is Library.LIBAEGIS:
            failed = self.decrypt(target, source, size, TAG_BYTES, begin, clear, nonce, key)
        else:
            null = self.ffi.NULL
            failed = self.decrypt(target, null, null, source, size, begin, clear, nonce, key)
        if failed:
            raise ProtocolError("a record fails authentication")


def libsodium() -> Cipher:
    """Return the functions of PyNaCl's libsodium."""
    sodium_init()  # without it libsodium uses no AES instructions, and is 500 times slower
    return _load(Library.LIBSODIUM, "nacl._sodium", "crypto_aead_aegis128l")


def libaegis() -> Cipher:
    """Return the functions of pyaegis's libaegis; raise ImportError or AttributeError without."""
    importlib.import_module("pyaegis")  # it calls aegis_init, which finds the instructions to use
    return _load(Library.LIBAEGIS, "pyaegis._aegis_ffi", "aegis128l")


def _load(library: Library, module: str, prefix: str) -> Cipher:
    loaded = cast("_Extension", importlib.import_module(module))  # it has no types
    ffi, lib, encrypt, decrypt = loaded.ffi, loaded.lib, f"{prefix}_encrypt", f"{prefix}_decrypt"
    seal_address = int(ffi.cast("uintptr_t", ffi.addressof(lib, encrypt)))
    open_address = int(ffi.cast("uintptr_t", ffi.addressof(lib, decrypt)))
    functions = getattr(lib, encrypt), getattr(lib, decrypt)
    return Cipher(library, ffi, *functions, seal_address, open_address)


def choose(platform: str) -> tuple[Cipher, str]:
    """Return what is fastest on a `sys.platform`, and why it is slow; empty if it is not."""
    if platform != "darwin":
        return libsodium(), ""
    try:
        return libaegis(), ""
    except (ImportError, AttributeError) as error:
        todo = "install the command line tools (xcode-select --install), and then pmesh again"
        return libsodium(), f"pyaegis can't be used ({error}); {todo}"


def describe(slow: str) -> str:
    """Return how a process encrypts for which WHY_SLOW is this.

    >>> describe("pyaegis is missing")
    'encrypts lanes without AES instructions, hundreds of times slower: pyaegis is missing'
    """
    return f"encrypts lanes without AES instructions, hundreds of times slower: {slow}"


_cipher, WHY_SLOW = choose(sys.platform)
seal, open_untrusted = _cipher.seal, _cipher.open_untrusted

LIBRARY: Final = _cipher.library
"""Which arguments the functions at the addresses take."""
SEAL_ADDRESS: Final = _cipher.seal_address
"""Where the library's function begins, for C."""
OPEN_ADDRESS: Final = _cipher.open_address
"""Where the library's function begins, for C."""
