"""What the network has shown becomes facts: status, mDNS and connections are put together."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pmesh import native
from pmesh.agent.schema import MemberStatus, PeerStatus, Status
from pmesh.cli.app import run
from pmesh.cli.doctor import looks, nearby, tools
from pmesh.cli.doctor.looks import Looks
from pmesh.cli.doctor.nearby import Heard, Tried
from pmesh.cli.doctor.rules import here
from pmesh.cli.doctor.rules.findings import Finding, diagnose
from pmesh.cli.doctor.rules.slow import SleepFacts
from pmesh.core.identity.advertisement import Advertisement
from pmesh.core.identity.keys import AdvertisementKey, MeshKey
from pmesh.core.links.addresses import LocalAddress
from pmesh.core.wire.link import PROTOCOL_VERSION, Address
from pmesh.errors import ConfigError
from pmesh.ids import Incarnation, NodeId, node_text
from pmesh.installed import installed_version
from pmesh.net.links.discovery import minute_of_now
from tests.cli.homes import use_home
from tests.worlds.fake_status_agent import SNAPSHOT
from tests.worlds.faults import Faults
from tests.worlds.system import be_on

KEY = MeshKey(bytes(range(32)))
TAG = AdvertisementKey.of(KEY).tag
ETHERNET = LocalAddress(interface="en0", host="10.0.0.1", prefix_bits=24, kind="wired")
LOOPBACK = LocalAddress(interface="lo0", host="127.0.0.1", prefix_bits=8, kind="loopback")
TUNNEL = LocalAddress(interface="utun4", host="10.8.0.1", prefix_bits=24, kind="vpn")
DENIED = "LocalNetworkDenied: 10.0.0.2 can't be reached: it is off, or macOS does not let this "


def node(number: int) -> NodeId:
    return NodeId(bytes([number]) * 32)


def announced(number: int, **changed: Any) -> Advertisement:  # noqa: ANN401 - fields
    fields: dict[str, Any] = {
        "tag": TAG,
        "node": node(number),
        "incarnation": Incarnation(1),
        "port": 24160,
        "name": f"mac-{number}",
        "hosts": (f"10.0.0.{number}",),
        "minute": minute_of_now(),
    }
    return Advertisement(**fields | changed)


def heard(*agents: Advertisement, hosts: Sequence[str] = (), error: str = "") -> Heard:
    return Heard({each.node: each for each in agents}, set(hosts), error)


def peer(number: int, state: Any = "linked", **changed: Any) -> PeerStatus:  # noqa: ANN401 - fields
    fields: dict[str, Any] = {
        "id": node_text(node(number)),
        "name": f"mac-{number}",
        "state": state,
        "addresses": (f"10.0.0.{number}:24160",),
    }
    return PeerStatus(**fields | changed)


def status(*peers: PeerStatus, members: int = 2, **changed: Any) -> Status:  # noqa: ANN401 - fields
    own = msgspec.structs.replace(SNAPSHOT.node, id=node_text(node(1)))
    view = msgspec.structs.replace(
        SNAPSHOT.view,
        members=tuple(
            MemberStatus(
                id=node_text(node(n)),
                name=f"mac-{n}",
                rank=n,
                health="self",
                rtt_ms=0,
                addresses=(),
            )
            for n in range(1, members + 1)
        ),
        edges=(),
    )
    fields: dict[str, Any] = {
        "version": installed_version(),
        "protocol": PROTOCOL_VERSION,
        "node": own,
        "view": view,
        "peers": peers,
        "held_off": (),
    }
    return msgspec.structs.replace(SNAPSHOT, **fields | changed)


class Scene:
    """A machine of which everything is told: no packet is sent, no program is run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.status = status(peer(2))
        self.heard = heard(announced(1), announced(2))
        self.tried: dict[str, Tried] = {}
        self.walls = tools.Walls()
        self.key: MeshKey | None = KEY
        self.local: tuple[LocalAddress, ...] = (ETHERNET,)
        self.mdns = True
        self.dialled: dict[str, Sequence[Address]] = {}
        self.listening: tuple[set[NodeId], float] = set(), 0.0
        self.leads_through = ETHERNET
        scene = self

        async def listen(*words: Any, least_s: float) -> Heard:  # noqa: ANN401 - as `listen`
            scene.listening = set(words[2]), least_s
            return scene.heard

        async def try_machines(
            machines: Mapping[str, Sequence[Address]], _: object
        ) -> dict[str, Tried]:
            scene.dialled |= machines
            well = {key: Tried(f"{key}:24160", "answers") for key in machines}
            return well | {key: tried for key, tried in scene.tried.items() if key in machines}

        async def look_at_firewalls(_: int) -> tools.Walls:
            return scene.walls

        async def look_at_sleep() -> SleepFacts:
            return SleepFacts()

        class SceneAddresses:
            def read(self) -> tuple[LocalAddress, ...]:
                return scene.local

        monkeypatch.setattr(nearby, "listen", listen)
        monkeypatch.setattr(nearby, "try_machines", try_machines)
        monkeypatch.setattr(nearby, "interface_to", lambda *_: scene.leads_through)
        monkeypatch.setattr(tools, "look_at_firewalls", look_at_firewalls)
        monkeypatch.setattr(tools, "look_at_sleep", look_at_sleep)
        monkeypatch.setattr(looks, "InterfaceReader", SceneAddresses)
        monkeypatch.setattr(looks, "listens_to_mdns", lambda _: scene.mdns)
        monkeypatch.setattr(native, "why_missing", lambda: "")
        be_on(monkeypatch, "darwin")

    def diagnose(self, *peers: str) -> list[Finding]:
        """All findings but those that were not tried."""
        self.dialled = {}
        asked = Looks(None, peers)
        asked.__dict__["_asked"] = here.AgentFacts(state="answers", pid=1), self.status
        asked.__dict__["_mesh_key"] = self.key
        return [each for each in diagnose(asked.checks()) if each.verdict != "not tried"]

    def first(self, *peers: str) -> tuple[str, str, str]:
        """The check, the verdict and the words of the first finding that is no good news."""
        good = {"well", "not looked at"}
        alarms = [each for each in self.diagnose(*peers) if each.verdict not in good]
        return (alarms[0].check, alarms[0].verdict, alarms[0].found) if alarms else ("", "", "")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    use_home(tmp_path, monkeypatch)
    tmp_path.chmod(0o700)
    return Scene(monkeypatch)


def test_a_mesh_that_is_well_has_no_alarm(scene: Scene) -> None:
    assert scene.first() == ("", "", "")
    assert scene.dialled == {node_text(node(2)): (Address("10.0.0.2", 24160),)}


def test_without_the_key_the_own_announcement_tells_which_mesh_is_ours(scene: Scene) -> None:
    scene.key = None
    assert scene.first() == ("", "", "")
    scene.heard = heard()
    assert scene.first()[:2] == ("mDNS", "remark")


def test_an_agent_that_was_started_before_the_update_is_named(scene: Scene) -> None:
    scene.status = status(peer(2), version="0.0.1")
    assert scene.first()[:2] == ("versions", "remark")


def test_a_machine_without_a_network_is_named_only_if_it_is_alone(scene: Scene) -> None:
    scene.local = (LOOPBACK,)
    own = msgspec.structs.replace(scene.status.node, addresses=("127.0.0.1:24160",))
    scene.status = status(members=1, node=own)
    assert scene.first() == ("interfaces", "cause", "no network interface is up")
    scene.status = status(peer(2), node=own)
    assert scene.first() == ("", "", "")


def test_a_firewall_is_the_cause_for_who_is_cut_off(scene: Scene) -> None:
    scene.walls = tools.Walls(blocks=("it drops all",))
    assert scene.first() == ("firewall", "remark", "it drops all")
    scene.status = status(peer(2, "unreachable"))
    assert scene.first() == ("firewall", "cause", "it drops all")


def test_macos_s_permission_is_judged_by_connections_of_both(scene: Scene) -> None:
    scene.tried = {node_text(node(2)): Tried("10.0.0.2:24160", "denied", DENIED)}
    scene.heard = heard(announced(1))
    check, verdict, words = scene.first()
    assert (check, verdict) == ("local network", "cause")
    assert "this program reach 10.0.0.2:24160" in words

    scene.tried = {}
    scene.status = status(peer(2, "unreachable", reason=f"{DENIED}program talk to the local…"))
    check, verdict, words = scene.first()
    assert (check, verdict) == ("local network", "cause")
    assert "the agent reach mac-2" in words


def test_linux_has_no_such_permission(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    be_on(monkeypatch, "linux")
    assert "local network" not in {each.check for each in scene.diagnose()}


def test_a_member_that_is_not_heard_has_multicast_dropped(scene: Scene) -> None:
    scene.heard = heard(announced(1))
    assert scene.first()[:2] == ("mDNS", "remark")
    scene.heard = heard(announced(1), hosts=["10.0.0.2"])  # it was, though not its announcement
    assert scene.first() == ("", "", "")
    scene.heard = heard(announced(1))
    scene.tried = {node_text(node(2)): Tried("10.0.0.2:24160", "unreachable", "off")}
    assert scene.first()[0] == "connections"


def test_a_machine_that_the_user_names_is_dialled(scene: Scene, faults: Faults) -> None:
    scene.status = status(members=1)
    scene.heard = heard(announced(1))
    assert scene.first() == ("mDNS", "cause", "nobody answers by mDNS")
    check, verdict, words = scene.first("10.0.0.9")
    assert (check, verdict) == ("mDNS", "cause")
    assert words == "10.0.0.9:24160 answers by unicast, and is not heard by mDNS"
    scene.tried = {"10.0.0.9:24160": Tried("10.0.0.9:24160", "unreachable", "refuses")}
    scene.heard = heard(announced(1), hosts=["10.0.0.50"])
    assert scene.first("10.0.0.9")[2] == "other devices are heard by mDNS, and no agent is"
    scene.status = status(peer(2))
    scene.heard = heard(announced(1), announced(2))
    assert scene.first("10.0.0.9")[2] == "10.0.0.9:24160 can't be dialled: refuses"
    assert scene.first("10.0.0.2") == ("", "", "")  # which is known
    assert len(scene.dialled) == 1

    async def look_up(_: Address) -> tuple[Address, ...]:
        return (Address("10.0.0.2", 24160),)

    faults.instead(nearby, "look_up", look_up)
    assert scene.first("mac-2.local") == ("", "", "")
    assert len(scene.dialled) == 1


def test_a_machine_that_is_named_is_tried_where_nobody_is_heard(scene: Scene) -> None:
    scene.status = status(members=1)
    scene.heard = heard(announced(1))
    scene.tried = {"10.0.0.9:24160": Tried("10.0.0.9:24160", "unreachable", "refuses")}
    causes = [each for each in scene.diagnose("10.0.0.9") if each.verdict == "cause"]
    assert [(each.check, each.found) for each in causes] == [
        ("connections", "10.0.0.9:24160 can't be dialled: refuses")
    ]


def test_a_machine_of_another_network_that_answers_is_named_to_the_agent(scene: Scene) -> None:
    scene.status = status(members=1)
    scene.heard = heard(announced(1))
    causes = [each for each in scene.diagnose("192.168.7.7") if each.verdict == "cause"]
    assert [(each.check, each.found) for each in causes] == [
        ("mDNS", "192.168.7.7:24160 answers by unicast, and is not heard by mDNS")
    ]
    assert "another network" in causes[0].means
    assert "pmesh up --peer" in causes[0].todo


@pytest.mark.parametrize("peer_text", ["10.0.0.1", "127.0.0.1"])
def test_this_machine_is_not_another_one_though_the_user_names_it(
    scene: Scene, peer_text: str
) -> None:
    scene.local = (ETHERNET, LOOPBACK)
    assert scene.first(peer_text) == ("", "", "")
    assert scene.dialled == {node_text(node(2)): (Address("10.0.0.2", 24160),)}
    scene.diagnose(f"{peer_text}:24161")  # of another agent
    assert len(scene.dialled) == 2


@pytest.mark.parametrize("text", ["", ":24160", "h:0", "h:x", "a b"])
def test_what_is_no_machine_can_t_be_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--peer"):
        Looks(None, [text])
    assert run(["doctor", "--peer", text]) == 2
    assert "--peer" in capsys.readouterr().err


def test_who_holds_another_key_is_named_once(scene: Scene) -> None:
    other = announced(3, tag=b"another!")
    scene.heard = heard(announced(1), other)
    scene.status = status(peer(3, "other_mesh_key"), members=1)
    check, verdict, words = scene.first()
    assert (check, verdict) == ("mesh keys", "cause")
    assert words == "mac-3 is here, and holds another mesh key"
    named = [each for each in scene.diagnose() if each.check == "mesh keys"]
    assert len(named) == 1
    scene.key = MeshKey(bytes(range(1, 33)))
    assert scene.first()[2] == "the agent has another mesh key than the home"


def test_another_protocol_is_named_with_the_agent_s_reason(scene: Scene) -> None:
    theirs = announced(3, protocol=PROTOCOL_VERSION + 1)
    scene.heard = heard(announced(1), announced(2), theirs)
    scene.status = status(peer(2), peer(3, "other_version", reason="it speaks 9; install it"))
    assert scene.first() == ("protocols", "cause", "mac-3: it speaks 9")


def test_a_vpn_that_leads_to_a_neighbour_is_named(scene: Scene) -> None:
    scene.local = (ETHERNET, TUNNEL)
    scene.leads_through = TUNNEL
    assert scene.first()[:2] == ("routes", "remark")
    # Who is reached by the VPN alone, and by IPv6 within a cable, says nothing of it.
    scene.status = status(peer(2, addresses=("10.8.0.2:24160", "[fe80::2]:24160")))
    scene.heard = heard(announced(1), announced(2, hosts=()))
    assert scene.first() == ("", "", "")


def test_a_machine_that_is_not_linked_is_named_with_the_agent_s_reason(scene: Scene) -> None:
    scene.status = status(peer(2, "refused", reason="it said no"))
    assert scene.first() == ("links", "cause", "mac-2 is not linked: it said no")
    scene.status = status(peer(2), peer(3, "connecting", id=None, name=None))
    scene.heard = heard(announced(1), announced(2), hosts=["10.0.0.3"])
    assert scene.first()[:2] == ("links", "remark")
    scene.status = status(peer(2), peer(3, "node_key_copied"))
    assert scene.first() == ("links", "cause", "mac-3 is not linked: node key copied")


def test_a_machine_has_the_name_by_which_it_is_heard(scene: Scene) -> None:
    scene.status = status(peer(2, "unreachable", name=None))
    scene.tried = {node_text(node(2)): Tried("10.0.0.2:24160", "unreachable", "no answer")}
    assert scene.first() == (
        "connections",
        "cause",
        "mac-2 is heard by mDNS, and accepts no connection: no answer",
    )


def test_a_machine_that_may_be_off_is_a_remark_at_its_end(scene: Scene) -> None:
    scene.status = status(peer(2), peer(3, "connecting", reason="it was here before"))
    scene.tried = {node_text(node(3)): Tried("10.0.0.3:24160", "unreachable", "no answer")}
    assert scene.first() == ("links", "remark", "mac-3 is not linked: it was here before")


def test_a_clock_that_is_apart_is_named(scene: Scene) -> None:
    scene.heard = heard(announced(1), announced(2, minute=minute_of_now() + 100))
    check, verdict, words = scene.first()
    assert (check, verdict) == ("clocks", "remark")
    assert "the clock of mac-2 is 100 minutes ahead" in words or "99" in words


def test_an_agent_that_is_asked_no_more_can_t_be_looked_at(scene: Scene) -> None:
    asked = Looks(None, ())
    asked.__dict__["_asked"] = here.AgentFacts(state="not running"), None
    with pytest.raises(OSError, match="the agent does not answer"):
        [*dict(asked.checks())["versions"]()]
    del scene


@pytest.mark.parametrize("mdns", [False, True])
def test_those_that_are_linked_are_waited_for_by_mdns(scene: Scene, *, mdns: bool) -> None:
    scene.mdns = mdns
    scene.diagnose()
    assert scene.listening == ({node(2), *([node(1)] * mdns)}, looks.LEAST_S)
    scene.status = status(peer(3, "unreachable"), members=1)
    scene.diagnose()
    assert scene.listening == ({node(1)} if mdns else set(), nearby.STRANGERS_S)
