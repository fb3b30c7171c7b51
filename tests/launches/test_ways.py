"""How a machine reaches another one without pmesh: over the best path, by an IPv4 address."""

from types import SimpleNamespace
from typing import cast

import pytest

from pmesh.agent.mesh.links import Link
from pmesh.core.links.paths import PathKey
from pmesh.core.wire.link import Address
from pmesh.ids import Member
from pmesh.launches.agent.ways import best_way


def link_over(
    far: str,
    *,
    interface: str = "en5",
    theirs: tuple[str, ...] = (),
    said: tuple[str, ...] = (),
    relay: Member | None = None,
) -> Link:
    """A link whose best path leads to `far`; the peer has told its hosts with the path, and all."""
    live = SimpleNamespace(
        key=PathKey(interface, "en1"),
        relay=relay,
        hosts=(frozenset[str](), frozenset(theirs)),
        path=SimpleNamespace(remote_address=Address(far, 7624)),
    )
    peer = SimpleNamespace(interfaces=(SimpleNamespace(hosts=said),))
    return cast("Link", SimpleNamespace(current=live, peer=peer))


@pytest.mark.parametrize(
    ("link", "way"),
    [
        (link_over("10.0.0.2", theirs=("10.0.0.1",)), ("10.0.0.2", "en5")),
        (link_over("fe80::2%en5", theirs=("169.254.7.7", "fe80::2")), ("169.254.7.7", "en5")),
        (link_over("fe80::2%en5", said=("fe80::2", "192.168.1.9")), ("192.168.1.9", "en5")),
        (link_over("fe80::2%en5", said=("; rm -rf ~", "fe80::2")), None),
        (link_over("10.0.0.2", interface="$(reboot)"), ("10.0.0.2", "")),
        (link_over("10.0.0.2", interface="a" * 16), ("10.0.0.2", "")),
        (link_over("10.0.0.2", relay=cast("Member", "mac-b")), ("10.0.0.2", "")),
    ],
)
def test_the_best_path_names_an_ipv4_address_and_an_interface_or_nothing(
    link: Link, way: tuple[str, str] | None
) -> None:
    assert best_way(link) == way


def test_without_a_path_there_is_no_way() -> None:
    assert best_way(cast("Link", SimpleNamespace(current=None))) is None
