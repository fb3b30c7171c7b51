"""Who can't be a member: named on both sides with the reason. Who looks odd but can: let in."""

import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pmesh.agent.schema import PeerStatus
from pmesh.core.identity.keys import MeshKey, mesh_key_text
from pmesh.core.wire.link import PROTOCOL_VERSION
from tests.e2e.harness import Fleet, StartedAgent
from tests.e2e.odd_agents import OTHER_VERSION, compile_clock

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def host() -> Iterator[tuple[Fleet, StartedAgent]]:
    """The agent at whose door they all knock."""
    with Fleet() as fleet:
        agent = fleet.start_agent("mac-1")
        agent.await_status(lambda _: True)
        yield fleet, agent


def await_peer(agent: StartedAgent, state: str, *words: str, name: str = "") -> PeerStatus:
    """The peer that its status shows in this state, with all these words in the reason."""

    def fits(peer: PeerStatus) -> bool:
        right = peer.state == state and name in ("", peer.name)
        return right and all(word in (peer.reason or "") for word in words)

    status = agent.await_status(lambda status: any(map(fits, status.peers)))
    return next(peer for peer in status.peers if fits(peer))


def test_another_mesh_key_is_named_on_both_sides_and_its_tag_in_status(
    host: tuple[Fleet, StartedAgent],
) -> None:
    fleet, agent = host
    key = mesh_key_text(MeshKey(secrets.token_bytes(32)))
    stranger = fleet.start_agent("stranger", "--peer", agent.address, mesh_key=key)

    for side in (stranger, agent):
        side.process.await_line(r"no link.*MeshKeyMismatch.*127\.0\.0\.1.*another mesh key")
        await_peer(side, "other_mesh_key", "another mesh key")
    # And by mDNS, for who does not dial: by its name, with what to do, and once.
    for side, other in ((agent, stranger), (stranger, agent)):
        seen = await_peer(side, "other_mesh_key", "pmesh join --replace", name=other.name)
        assert seen.id == other.status().node.id
        # Those of other tests on this loopback have ids of their own.
        of_it = [peer.state for peer in side.status().peers if peer.id in {None, seen.id}]
        assert of_it == ["other_mesh_key"]
    assert "other mesh key" in fleet.pmesh("status", home=agent.home).stdout
    assert len(agent.status().view.members) == 1


def test_another_version_is_named_on_both_sides_with_both_versions(
    host: tuple[Fleet, StartedAgent],
) -> None:
    fleet, agent = host
    options = ("--no-mdns", "--peer", agent.address)
    newer = fleet.start_agent("newer", *options, patch=OTHER_VERSION)
    ours, theirs = PROTOCOL_VERSION, PROTOCOL_VERSION + 41

    for side, own, other in ((agent, ours, theirs), (newer, theirs, ours)):
        side.process.await_line(r"no link.*ProtocolVersionMismatch")
        words = f"speaks protocol {other}, this machine {own};", "install the same version"
        await_peer(side, "other_version", *words)
    assert len(agent.status().view.members) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD replaces the system's clock")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_clock_that_is_wrong_by_years_changes_nothing(
    host: tuple[Fleet, StartedAgent], tmp_path: Path
) -> None:
    fleet, agent = host
    dreamer = fleet.start_agent(
        "dreamer",
        "--peer",
        agent.address,
        patch="import datetime; print('it is', datetime.datetime.now().year)",
        LD_PRELOAD=str(compile_clock(tmp_path)),
    )

    assert int(dreamer.process.await_line(r"it is (\d+)")[1]) > 2060
    fleet.await_view(agent, dreamer)
    source = (
        "import pmesh; print(pmesh.connect('dream', 2, timeout_s=20).all_reduce(x), 'together')"
    )
    source = f"import numpy; x = numpy.ones(2); {source}"
    trainers = [fleet.start_trainer(side, source) for side in (agent, dreamer)]
    for trainer in trainers:
        trainer.await_line(r"\[2. 2.\] together")
