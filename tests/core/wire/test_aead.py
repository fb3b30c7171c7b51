import ctypes
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.wire import aead
from pmesh.core.wire.aead import Cipher, Library
from pmesh.errors import ProtocolError

KEY = bytes(range(16))

SODIUM = aead.libsodium()
CIPHERS: tuple[Cipher, ...] = (SODIUM, aead.libaegis()) if find_spec("pyaegis") else (SODIUM,)
each_cipher = pytest.mark.parametrize("cipher", CIPHERS, ids=lambda cipher: cipher.library.name)
needs_pyaegis = pytest.mark.skipif(len(CIPHERS) == 1, reason="pyaegis is not installed")

# draft-irtf-cfrg-aegis-aead, appendix A.2: the vectors of AEGIS-128L, with the tags of 256 bits.
VECTOR_KEY = bytes.fromhex("10010000000000000000000000000000")
VECTOR_NONCE = bytes.fromhex("10000200000000000000000000000000")
VECTORS = [
    pytest.param(
        "",
        "00000000000000000000000000000000",
        "c1c0e58bd913006feba00f4b3cc3594e",
        "25835bfbb21632176cf03840687cb968cace4617af1bd0f7d064c639a5c79ee4",
        id="one half of a block",
    ),
    pytest.param(
        "",
        "",
        "",
        "1360dc9db8ae42455f6e5b6a9d488ea4f2184c4e12120249335c4ee84bafe25d",
        id="empty",
    ),
    pytest.param(
        "0001020304050607",
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
        "79d94593d8c2119d7e8fd9b8fc77845c5c077a05b2528b6ac54b563aed8efe84",
        "022cb796fe7e0ae1197525ff67e309484cfbab6528ddef89f17d74ef8ecd82b3",
        id="a whole block, and some in clear",
    ),
    pytest.param(
        "0001020304050607",
        "000102030405060708090a0b0c0d",
        "79d94593d8c2119d7e8fd9b8fc77",
        "86f1b80bfb463aba711d15405d094baf4a55a15dbfec81a76f35ed0b9c8b04ac",
        id="a part of a block, and some in clear",
    ),
    pytest.param(
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20212223242526272829",
        "101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f3031323334353637",
        "b31052ad1cca4e291abcf2df3502e6bdb1bfd6db36798be3607b1f94d34478aa7ede7f7a990fec10",
        "b91e2947a33da8bee89b6794e647baf0fc835ff574aca3fc27c33be0db2aff98",
        id="several blocks of each",
    ),
]


def sealed(
    clear: bytes, body: bytes, *, key: bytes = KEY, number: int = 1, cipher: Cipher = SODIUM
) -> bytes:
    record = memoryview(bytearray(clear + bytes(len(body) + aead.TAG_BYTES)))
    cipher.seal(key, number, record, len(clear), body)
    return bytes(record)


def opened(
    record: bytes, clear: int, *, key: bytes = KEY, number: int = 1, cipher: Cipher = SODIUM
) -> bytes:
    into = bytearray(len(record) - clear - aead.TAG_BYTES)
    cipher.open_untrusted(key, number, memoryview(record), clear, into)
    return bytes(into)


@each_cipher
@pytest.mark.parametrize(("clear", "body", "encrypted", "tag"), VECTORS)
def test_the_bytes_are_those_of_the_draft(
    clear: str, body: str, encrypted: str, tag: str, cipher: Cipher
) -> None:
    key, number = VECTOR_KEY, int.from_bytes(VECTOR_NONCE, "big")
    inner = bytes.fromhex(body)
    record = sealed(bytes.fromhex(clear), inner, key=key, number=number, cipher=cipher)

    assert record.hex() == clear + encrypted + tag
    assert opened(record, len(clear) // 2, key=key, number=number, cipher=cipher) == inner


@needs_pyaegis
@given(st.binary(max_size=200), st.binary(max_size=200), st.integers(0, 2**128 - 1))
def test_each_library_opens_what_the_other_has_sealed(
    clear: bytes, body: bytes, number: int
) -> None:
    for one, other in (CIPHERS, CIPHERS[::-1]):
        record = sealed(clear, body, number=number, cipher=one)
        assert opened(record, len(clear), number=number, cipher=other) == body


@each_cipher
@given(st.binary(max_size=70), st.binary(max_size=70), st.data())
def test_a_change_of_any_byte_is_refused_and_nothing_of_the_body_is_given(
    cipher: Cipher, clear: bytes, body: bytes, data: st.DataObject
) -> None:
    record = bytearray(sealed(clear, body))
    at, change = data.draw(st.integers(0, len(record) - 1)), data.draw(st.integers(1, 255))
    record[at] ^= change
    into = bytearray(b"x" * len(body))

    with pytest.raises(ProtocolError, match="fails authentication"):
        cipher.open_untrusted(KEY, 1, memoryview(record), len(clear), into)

    assert into == bytes(len(body))


@each_cipher
@pytest.mark.parametrize("changed", range(8 + 5 + aead.TAG_BYTES))
def test_no_byte_of_a_record_is_without_protection(changed: int, cipher: Cipher) -> None:
    record = bytearray(sealed(b"in clear", b"inner"))
    record[changed] ^= 1
    with pytest.raises(ProtocolError, match="fails authentication"):
        opened(bytes(record), 8, cipher=cipher)


@each_cipher
def test_another_key_another_number_and_another_border_are_refused(cipher: Cipher) -> None:
    record = sealed(b"in clear", b"inner")
    for key, number, clear in ((bytes(16), 1, 8), (KEY, 2, 8), (KEY, 1, 7), (KEY, 1, 9)):
        with pytest.raises(ProtocolError, match="fails authentication"):
            opened(record, clear, key=key, number=number, cipher=cipher)


@each_cipher
@pytest.mark.parametrize("room", [0, 8, 44, 46, 100])
def test_nothing_is_written_behind_a_buffer_that_does_not_fit(room: int, cipher: Cipher) -> None:
    with pytest.raises(ValueError, match=rf"{room} bytes for 8 in clear and 5 to encrypt"):
        cipher.seal(KEY, 1, memoryview(bytearray(room)), 8, b"inner")
    with pytest.raises(ProtocolError, match=rf"a record of {room} bytes for a body of 5"):
        cipher.open_untrusted(KEY, 1, memoryview(bytes(room)), 8, bytearray(5))


@needs_pyaegis
def test_a_mac_uses_libaegis_and_others_libsodium() -> None:
    assert {at: aead.choose(at)[0].library for at in ("darwin", "linux")} == {
        "darwin": Library.LIBAEGIS,
        "linux": Library.LIBSODIUM,
    }
    assert aead.choose("darwin")[1] == aead.choose("linux")[1] == ""


def test_a_mac_without_libaegis_uses_libsodium_and_says_why_it_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pyaegis", None)
    monkeypatch.delitem(sys.modules, "pyaegis._aegis_ffi", raising=False)
    cipher, slow = aead.choose("darwin")
    assert cipher.library == Library.LIBSODIUM
    assert slow.startswith("pyaegis can't be used (")
    assert slow.endswith(
        "); install the command line tools (xcode-select --install), and then pmesh again"
    )


def test_this_process_uses_what_is_chosen_for_its_platform() -> None:
    chosen, slow = aead.choose(sys.platform)
    assert (chosen.library, slow) == (aead.LIBRARY, aead.WHY_SLOW)
    assert (chosen.seal_address, chosen.open_address) == (aead.SEAL_ADDRESS, aead.OPEN_ADDRESS)
    record = memoryview(bytearray(45))
    aead.seal(KEY, 1, record, 8, b"inner")
    assert record[:8] == bytes(8)
    assert opened(bytes(record), 8) == b"inner"


def test_libsodium_has_chosen_the_fast_code_before_anything_is_sealed() -> None:
    program = (
        "from pmesh.core.wire import aead; aead.libsodium(); "
        "from nacl._sodium import lib; print(lib.sodium_init())"
    )
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout
    assert said == b"1\n"  # it had been initialized


def call(address: int, *arguments: object) -> int:
    types = [ctypes.c_size_t if isinstance(a, int) else ctypes.c_void_p for a in arguments]
    return int(ctypes.CFUNCTYPE(ctypes.c_int, *types)(address)(*arguments))


@each_cipher
def test_c_finds_the_same_functions_at_the_addresses(cipher: Cipher) -> None:
    nonce, record, body = bytes(15) + b"\1", ctypes.create_string_buffer(37), bytearray(5)
    into = ctypes.byref(ctypes.c_char.from_buffer(body))
    seal, reopen = partial(call, cipher.seal_address), partial(call, cipher.open_address)

    if cipher.library == Library.LIBSODIUM:
        assert seal(record, None, b"inner", 5, b"in clear", 8, None, nonce, KEY) == 0
        reopen = partial(reopen, into, None, None, record.raw, 37)
    else:
        assert seal(record, 32, b"inner", 5, b"in clear", 8, nonce, KEY) == 0
        reopen = partial(reopen, into, record.raw, 37, 32)

    assert b"in clear" + record.raw == sealed(b"in clear", b"inner")
    assert reopen(b"in clear", 8, nonce, KEY) == 0
    assert body == b"inner"
    assert reopen(b"in cleaR", 8, nonce, KEY) == -1
