import contextlib
import datetime as dt
import hashlib

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.identity.certificates import (
    derive_authority,
    issue_credentials,
    node_of_certificate_untrusted,
)
from pmesh.core.identity.keys import MeshKey, NodeKey
from pmesh.errors import ProtocolError

MESH = MeshKey(bytes(range(32)))
ADA, BOB = NodeKey.from_seed(b"a" * 32), NodeKey.from_seed(b"b" * 32)


def leaf_of(node_key: NodeKey) -> x509.Certificate:
    return x509.load_pem_x509_certificate(issue_credentials(MESH, node_key).leaf_pem)


def der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


def test_every_node_derives_the_same_authority_to_the_byte() -> None:
    authority = issue_credentials(MESH, ADA).ca_der
    assert authority == issue_credentials(MESH, BOB).ca_der
    # Another release of a library must not change it either: half of a mesh would be locked out.
    assert hashlib.sha256(authority).hexdigest()[:16] == "f7f76204471bd3a5"


def test_another_mesh_key_gives_another_authority() -> None:
    other = MeshKey(bytes(32))
    assert issue_credentials(MESH, ADA).ca_der != issue_credentials(other, ADA).ca_der


def test_a_leaf_is_signed_by_the_authority_and_names_its_node() -> None:
    leaf = leaf_of(ADA)
    leaf.verify_directly_issued_by(derive_authority(MESH).certificate)
    assert node_of_certificate_untrusted(der(leaf)) == ADA.node


def test_a_leaf_can_not_issue_further_leaves() -> None:
    constraints = leaf_of(ADA).extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert not constraints.value.ca
    authority = derive_authority(MESH).certificate
    assert (
        authority.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    )


def test_no_clock_lies_outside_the_dates() -> None:
    for certificate in (leaf_of(ADA), derive_authority(MESH).certificate):
        assert certificate.not_valid_before_utc.year == 1970
        assert certificate.not_valid_after_utc.year == 9999


def test_serial_numbers_differ_from_node_to_node_and_fit_in_20_octets() -> None:
    numbers = [leaf_of(ADA).serial_number, leaf_of(BOB).serial_number, 1]
    assert len(set(numbers)) == 3
    assert all(0 < number < 1 << 159 for number in numbers)


def test_secrets_do_not_show_in_a_repr() -> None:
    assert "PRIVATE KEY" not in repr(issue_credentials(MESH, ADA))


def test_a_leaf_over_another_kind_of_key_is_refused() -> None:
    authority = derive_authority(MESH)
    name = authority.certificate.subject
    key = ec.generate_private_key(ec.SECP256R1())
    day = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    leaf = x509.CertificateBuilder(name, name, key.public_key(), 5, day, day)
    with pytest.raises(ProtocolError, match="not over an Ed25519 key"):
        node_of_certificate_untrusted(der(leaf.sign(authority.key, None)))


@given(st.binary())
def test_garbage_is_not_a_certificate(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        node_of_certificate_untrusted(data)


@given(st.data())
def test_a_damaged_certificate_raises_protocol_error_or_names_some_node(
    data: st.DataObject,
) -> None:
    damaged = bytearray(der(leaf_of(ADA)))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(1, len(damaged))) :]
    with contextlib.suppress(ProtocolError):
        assert len(node_of_certificate_untrusted(bytes(damaged))) == 32
