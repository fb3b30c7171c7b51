"""The system's tools, replaced by what they print: macOS's, ufw, nftables, systemd."""

import errno
import shutil
import sys
from pathlib import Path

import pytest

from pmesh.cli.doctor import tools
from pmesh.cli.doctor.rules.slow import SleepFacts
from pmesh.cli.doctor.tools import Walls, look_at_firewalls, look_at_sleep, run_tool
from tests.worlds.faults import Faults
from tests.worlds.system import be_on, be_user

DROPS = """{"nftables": [{"chain": {"family": "inet", "table": "t", "name": "c", "hook": "input",
"policy": "drop"}}]}"""


class SystemTools:
    """What the tools print, by the first words of a command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.prints: dict[str, str] = {}
        self.conf = tmp_path / "ufw.conf"
        self.systemd = tmp_path / "systemd"
        self.has_nft = True
        system = self

        async def run(*command: str) -> str:
            words = " ".join(command)
            return next((t for begin, t in system.prints.items() if words.startswith(begin)), "")

        def which(*_: object, **__: object) -> str | None:
            return "/usr/sbin/nft" if system.has_nft else None

        monkeypatch.setattr(tools, "run_tool", run)
        monkeypatch.setattr(shutil, "which", which)
        monkeypatch.setattr(tools, "_UFW_CONF", self.conf)
        monkeypatch.setattr(tools, "_SYSTEMD", self.systemd)
        self._patch = monkeypatch

    def be(self, platform: str, *, root: bool = True) -> None:
        be_on(self._patch, platform)
        be_user(self._patch, 0 if root else 501)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SystemTools:
    return SystemTools(monkeypatch, tmp_path)


SOCKETFILTERFW = "/usr/libexec/ApplicationFirewall/socketfilterfw"


async def test_macos_s_firewall_is_asked(system: SystemTools) -> None:
    system.be("darwin", root=False)
    assert (await look_at_firewalls(24160)).unseen
    state = f"{SOCKETFILTERFW} --getglobalstate"
    system.prints = {state: "Firewall is disabled. (State = 0)\n"}
    assert not (await look_at_firewalls(24160)).asks
    system.prints = {state: "Firewall is enabled. (State = 1)\n"}
    assert (await look_at_firewalls(24160)).asks
    system.prints[f"{SOCKETFILTERFW} --getblockall"] = "Block all ENABLED!\n"
    walls = await look_at_firewalls(24160)
    assert walls.blocks == ("the firewall of macOS blocks all incoming connections",)
    assert "Block all incoming connections" in walls.todo


async def test_ufw_is_asked_first_and_tells_root_alone(system: SystemTools) -> None:
    system.be("linux")
    system.conf.write_text("ENABLED=yes\n")
    system.prints = {"ufw status": "Status: active\n", "nft": DROPS}
    walls = await look_at_firewalls(24160)
    assert walls.blocks == ("ufw is on, and no rule of it allows port 24160",)
    assert walls.todo == "sudo ufw allow 24160/tcp, and sudo ufw allow 5353/udp"
    system.be("linux", root=False)
    assert "needs root" in (await look_at_firewalls(24160)).unseen


MADE_BY_UFW = """{"nftables": [{"chain": {"family": "ip", "table": "filter", "name": "INPUT",
"hook": "input", "policy": "drop"}}, {"chain": {"family": "ip", "table": "filter", "name":
"ufw-user-input"}}, {"rule": {"family": "ip", "table": "filter", "chain": "ufw-user-input", "expr":
[{"xt": null}, {"accept": null}]}}]}"""


async def test_chains_that_ufw_has_made_are_judged_by_its_own_words(system: SystemTools) -> None:
    system.be("linux")
    system.conf.write_text("ENABLED=yes\n")
    status = "Status: active\n\n24000:25000/tcp            ALLOW       Anywhere\n"
    system.prints = {"ufw status": status, "nft -j list ruleset": MADE_BY_UFW}
    assert await look_at_firewalls(24160) == Walls()


async def test_a_setting_of_ufw_that_can_t_be_read_is_not_looked_at(
    system: SystemTools, faults: Faults
) -> None:
    system.be("linux", root=False)
    system.conf.write_text("ENABLED=yes\n")
    faults.fail(Path, "read_text", PermissionError(errno.EACCES, "Permission denied"))
    walls = await look_at_firewalls(24160)
    assert walls.unseen == f"can't read {system.conf}: Permission denied; as root: ufw status"


async def test_nftables_tells_root_alone(system: SystemTools) -> None:
    system.be("linux")
    system.prints = {"nft -j list ruleset": DROPS}
    assert len((await look_at_firewalls(24160)).blocks) == 1
    system.be("linux", root=False)
    assert "sudo nft list ruleset" in (await look_at_firewalls(24160)).unseen
    system.has_nft = False
    assert await look_at_firewalls(24160) == Walls()


async def test_when_a_machine_falls_asleep_is_asked_where_that_is_decided(
    system: SystemTools,
) -> None:
    system.be("darwin")
    system.prints = {"pmset -g": " sleep                5\n"}
    assert (await look_at_sleep()).after == "5 minutes without input"
    system.be("linux")
    assert (await look_at_sleep()).unseen == "without systemd nothing is known of sleep"
    system.systemd.mkdir()
    system.prints = {"systemd-analyze": "IdleAction=suspend\n"}
    assert (await look_at_sleep()).after == "30min without input (IdleAction=suspend)"
    system.prints["systemctl show"] = "masked\n"
    assert await look_at_sleep() == SleepFacts()


async def test_a_tool_says_nothing_if_it_is_missing_fails_or_hangs(faults: Faults) -> None:
    faults.limit(tools, "TIMEOUT_S", 30.0)
    assert await run_tool(sys.executable, "-c", "print('hello')") == "hello\n"
    assert await run_tool(sys.executable, "-c", "print('hello'); exit(1)") == ""
    assert await run_tool("/no/such/program") == ""
    faults.limit(tools, "TIMEOUT_S", 0.2)
    assert await run_tool(sys.executable, "-c", "import time; time.sleep(60)") == ""
