import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.identity.keys import (
    MeshKey,
    NodeKey,
    derive,
    mesh_key_from_text,
    mesh_key_text,
    namespace_tag,
    verify,
)
from pmesh.ids import NodeId

seeds = st.binary(min_size=32, max_size=32)
mesh_keys = seeds.map(lambda seed: MeshKey(hashlib.sha3_256(seed).digest()))
CHARACTERS = "abcdefghijklmnopqrstuvwxyz234567"


@given(mesh_keys)
def test_a_mesh_key_comes_back_from_its_text(key: MeshKey) -> None:
    assert mesh_key_from_text(mesh_key_text(key)) == key


@given(mesh_keys, st.data())
def test_what_happens_to_a_pasted_text_on_its_way_does_not_matter(
    key: MeshKey, data: st.DataObject
) -> None:
    text = mesh_key_text(key)
    for _ in range(data.draw(st.integers(0, 5))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.sampled_from([" ", "\n", "\r\n", "\t", "-"])) + text[at:]
    text = data.draw(st.sampled_from([text, text.upper(), text.replace("-", ""), f" {text}\n"]))
    assert mesh_key_from_text(text) == key


@given(mesh_keys, st.integers(0, 55), st.sampled_from(CHARACTERS))
def test_a_mistyped_character_is_refused(key: MeshKey, at: int, character: str) -> None:
    characters = list(mesh_key_text(key).replace("-", ""))
    if characters[len("pmesh") + at] == character:
        return
    characters[len("pmesh") + at] = character
    with pytest.raises(ValueError, match="checksum"):
        mesh_key_from_text("".join(characters))


@pytest.mark.parametrize("part", [b"\0", b"\xff", b"ab", bytes(range(8))])
def test_a_key_that_anybody_can_guess_is_refused(part: bytes) -> None:
    text = mesh_key_text(MeshKey(part * (32 // len(part))))
    with pytest.raises(ValueError, match="'pmesh key new' makes a random one"):
        mesh_key_from_text(text)


def test_two_swapped_groups_are_refused() -> None:
    prefix, first, second, *rest = mesh_key_text(MeshKey(bytes(range(32)))).split("-")
    with pytest.raises(ValueError, match="checksum"):
        mesh_key_from_text("-".join([prefix, second, first, *rest]))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "begins with 'pmesh-'"),
        ("correct horse battery staple", "begins with 'pmesh-'"),
        ("pmesh-", "this text has 0: copy the whole line"),
        ("pmesh-" + "a" * 55, "this text has 55"),
        ("pmesh-" + "a" * 57, "this text has 57"),
        ("pmesh-" + "0" * 56, "not '0'"),
        ("pmesh-" + "ä" * 56, "not 'ä'"),
    ],
)
def test_the_refusal_says_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        mesh_key_from_text(text)


def test_a_refusal_does_not_repeat_the_key() -> None:
    text = mesh_key_text(MeshKey(bytes(range(32))))
    with pytest.raises(ValueError, match="copy the whole line") as refusal:
        mesh_key_from_text(text[:-1])
    assert text[6:20] not in str(refusal.value)


@given(st.text())
def test_any_other_text_raises_value_error_only(text: str) -> None:
    for waiter in (text, "pmesh-" + text):
        with pytest.raises(ValueError, match="mesh key"):
            mesh_key_from_text(waiter)


@given(mesh_keys, mesh_keys)
def test_the_tag_tells_meshes_apart_and_is_not_a_hash_of_the_key(a: MeshKey, b: MeshKey) -> None:
    assert (namespace_tag(a) == namespace_tag(b)) == (a == b)
    assert len(namespace_tag(a)) == 8
    assert namespace_tag(a) != hashlib.sha3_256(a).digest()[:8]
    assert derive(a, b"one") != derive(a, b"another")


def test_the_tag_never_changes_between_releases() -> None:
    # Else a mesh in the middle of an upgrade falls into two that don't see each other.
    assert namespace_tag(MeshKey(bytes(32))).hex() == "7ce3ed7ea434eb5e"


def test_a_cut_mesh_key_derives_nothing() -> None:
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        namespace_tag(MeshKey(bytes(31)))


def test_a_node_key_is_the_key_pair_of_its_seed() -> None:
    # RFC 8032, section 7.1, test 1.
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    key = NodeKey.from_seed(seed)
    assert key.node == public
    assert key.sign(b"").hex().startswith("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e0")


def test_a_node_key_never_shows_its_seed() -> None:
    assert "seed" not in repr(NodeKey.from_seed(bytes(range(32))))


def test_a_seed_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes, not 33"):
        NodeKey.from_seed(bytes(33))


@given(st.binary(min_size=32, max_size=32), st.binary())
def test_a_signature_holds_for_its_message_and_node_only(seed: bytes, message: bytes) -> None:
    key, other = NodeKey.from_seed(seed), NodeKey.from_seed(hashlib.sha256(seed).digest())
    signature = key.sign(message)
    assert len(signature) == 64
    assert verify(key.node, message, signature)
    assert not verify(key.node, message + b"!", signature)
    assert not verify(other.node, message, signature)


@given(st.binary(), st.binary(), st.binary())
def test_what_can_not_be_a_key_or_a_signature_verifies_nothing(
    node: bytes, message: bytes, signature: bytes
) -> None:
    assert not verify(NodeId(node), message, signature)
