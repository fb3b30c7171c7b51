"""The mesh key as a certificate authority: only its holders can issue a leaf certificate.

Every node derives the same authority, byte for byte, and certifies its own node key with it. So
mutual TLS proves both that the peer holds the mesh key and which node it is.
"""

import datetime as dt
import hashlib
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from pmesh.core.identity.keys import MeshKey, NodeKey, derive
from pmesh.errors import ProtocolError
from pmesh.ids import NodeId

# Valid at any time: home clocks are wrong by years, and the protocol must not depend on them.
_BEGIN = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_END = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC)

_SERIAL_BYTES = 19  # RFC 5280, 4.1.2.2: at most 20 octets, with room for the sign


@dataclass(frozen=True, slots=True)
class Credentials:
    """The certificates and the key of a node for TLS handshakes."""

    ca_der: bytes
    """The mesh's authority: equal bytes on every node."""
    leaf_pem: bytes
    """The node's own certificate, over its node key."""
    key_pem: bytes = field(repr=False)
    """The node key in PKCS #8: secret."""


@dataclass(frozen=True, slots=True)
class Authority:
    """The mesh's certificate authority; its private key is as secret as the mesh key."""

    key: Ed25519PrivateKey = field(repr=False)
    certificate: x509.Certificate


def derive_authority(mesh_key: MeshKey) -> Authority:
    """Return the authority of a mesh: the same bytes everywhere, since Ed25519 is deterministic.

    Raises ValueError if the mesh key has the wrong size.
    """
    key = Ed25519PrivateKey.from_private_bytes(derive(mesh_key, b"certificate authority"))
    name = _name("pmesh")
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, _BEGIN, _END)
        # Path length 0: a leaf cannot be an authority itself.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, None)
    )
    return Authority(key, certificate)


def issue_credentials(mesh_key: MeshKey, node_key: NodeKey) -> Credentials:
    """Certify a node key with the authority of a mesh; ValueError if the mesh key is cut."""
    authority = derive_authority(mesh_key)
    private = Ed25519PrivateKey.from_private_bytes(node_key.seed)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    leaf = (
        x509.CertificateBuilder(
            issuer_name=authority.certificate.subject,
            subject_name=_name("pmesh node"),
            public_key=private.public_key(),
            serial_number=_serial(node_key.node),
            not_valid_before=_BEGIN,
            not_valid_after=_END,
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(authority.key, None)
    )
    return Credentials(
        ca_der=authority.certificate.public_bytes(serialization.Encoding.DER),
        leaf_pem=leaf.public_bytes(serialization.Encoding.PEM),
        key_pem=private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def node_of_certificate_untrusted(der: bytes) -> NodeId:
    """Return the node of a certificate; raise ProtocolError unless it is over an Ed25519 key.

    It reads only the key: TLS proves that the mesh's authority signed it.
    """
    try:
        key = x509.load_der_x509_certificate(der).public_key()
    except (ValueError, UnsupportedAlgorithm) as e:
        raise ProtocolError(f"not a certificate: {e}") from e
    if not isinstance(key, Ed25519PublicKey):
        raise ProtocolError("the certificate is not over an Ed25519 key")
    return NodeId(key.public_bytes_raw())


def _serial(node: NodeId) -> int:
    """Return a unique number for each node: an authority must not use one twice (RFC 5280)."""
    return int.from_bytes(hashlib.sha256(node).digest()[:_SERIAL_BYTES], "big") + 2


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_usage(*, digital_signature: bool = False, key_cert_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
