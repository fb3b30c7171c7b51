"""Two nodes of one mesh, and what else the tests of links need."""

import datetime as dt
import ssl
from dataclasses import replace
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace as change

from pmesh.core.identity.certificates import Credentials, derive_authority, issue_credentials
from pmesh.core.identity.keys import MeshKey, NodeKey
from pmesh.core.identity.names import sign_name
from pmesh.core.values import Seat, Trainer, View
from pmesh.core.wire.link import PROTOCOL_VERSION, Hello
from pmesh.ids import Incarnation, Member
from pmesh.net.links.tls import TlsContexts

AnySeated = TypeVar("AnySeated", Seat, Trainer)

MESH = MeshKey(b"m" * 32)
OTHER_MESH = MeshKey(b"o" * 32)
ADA, BOB = NodeKey.from_seed(b"a" * 32), NodeKey.from_seed(b"b" * 32)

ADAS = TlsContexts.of(issue_credentials(MESH, ADA))
BOBS = TlsContexts.of(issue_credentials(MESH, BOB))
STRANGERS = TlsContexts.of(issue_credentials(OTHER_MESH, BOB))


def hello_of(key: NodeKey, name: str, *, protocol: int = PROTOCOL_VERSION) -> Hello:
    member = Member(key.node, Incarnation(1))
    return Hello(protocol, member, sign_name(key, member, name))


def signed(view: View, *keys: NodeKey) -> View:
    """The view with the names of these nodes signed, where they have a seat or a rank."""
    known = {key.node: key for key in keys}

    def sign(one: AnySeated) -> AnySeated:
        key = known.get(one.member.node)
        return one if key is None else change(one, said=sign_name(key, one.member, one.name))

    rosters = tuple(change(r, trainers=tuple(map(sign, r.trainers))) for r in view.rosters)
    return change(view, seats=tuple(map(sign, view.seats)), rosters=rosters)


ADAS_HELLO, BOBS_HELLO = hello_of(ADA, "ada"), hello_of(BOB, "bob")


def odd_leaf(
    key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey,
    *,
    years: tuple[int, int] = (1970, 9999),
    mesh_key: MeshKey = MESH,
    trusts: MeshKey = MESH,
) -> Credentials:
    """A leaf that our own code never makes, but a holder of `mesh_key` could."""
    authority = derive_authority(mesh_key)
    begin, end = (dt.datetime(year, 1, 1, tzinfo=dt.UTC) for year in years)
    leaf = (
        x509.CertificateBuilder(
            authority.certificate.subject, x509.Name([]), key.public_key(), 7, begin, end
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
        .sign(authority.key, None)
    )
    return replace(
        issue_credentials(trusts, ADA),
        leaf_pem=leaf.public_bytes(serialization.Encoding.PEM),
        key_pem=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def naive_client() -> ssl.SSLContext:
    """A client that believes anybody, and has nothing to show."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
