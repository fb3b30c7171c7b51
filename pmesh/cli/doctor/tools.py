"""Asks the tools of the system: each has 2 s, and one that is missing says nothing."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from pmesh.cli.doctor.rules.nftables import read_nftables
from pmesh.cli.doctor.rules.outputs import (
    read_logind,
    read_pmset,
    read_socketfilterfw,
    read_ufw,
)
from pmesh.cli.doctor.rules.slow import SleepFacts

TIMEOUT_S: Final = 2.0
_SOCKETFILTERFW: Final = "/usr/libexec/ApplicationFirewall/socketfilterfw"
_UFW_CONF: Final = Path("/etc/ufw/ufw.conf")
_SYSTEMD: Final = Path("/run/systemd/system")  # sd_booted(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Walls:
    """What was found of the firewalls; the fields are those of `FirewallFacts`."""

    blocks: tuple[str, ...] = ()
    asks: bool = False
    unseen: str = ""
    todo: str = ""


async def run_tool(*command: str) -> str:
    """Return what a command prints; nothing if it is missing, fails, or takes longer than 2 s."""
    with trio.move_on_after(TIMEOUT_S):
        try:
            done = await trio.run_process(
                command, capture_stdout=True, capture_stderr=True, check=False
            )
        except OSError:
            return ""
        return done.stdout.decode(errors="replace") if not done.returncode else ""
    return ""


async def look_at_firewalls(port: int) -> Walls:
    """Return what this machine's firewalls do with packets for the agent at this port."""
    return await (_of_macos() if sys.platform == "darwin" else _of_linux(port))


async def _of_macos() -> Walls:
    state = await run_tool(_SOCKETFILTERFW, "--getglobalstate")
    found = read_socketfilterfw(state + await run_tool(_SOCKETFILTERFW, "--getblockall"))
    if found is None:
        return Walls(unseen="socketfilterfw does not tell the state of the firewall")
    pane = "System Settings → Network → Firewall → Options"
    if found.blocks_all:
        return Walls(
            blocks=("the firewall of macOS blocks all incoming connections",),
            todo=f"turn off 'Block all incoming connections' in {pane}",
        )
    return Walls(asks=found.is_on, todo=f"set python3 to 'Allow incoming connections' in {pane}")


async def _of_linux(port: int) -> Walls:
    is_root = os.geteuid() == 0
    try:
        conf = _UFW_CONF.read_text(errors="replace")
    except FileNotFoundError:
        conf = ""
    except OSError as e:
        return Walls(unseen=f"can't read {_UFW_CONF}: {e.strerror}; as root: ufw status")
    ufw = read_ufw(conf, await run_tool("ufw", "status", "verbose") if is_root else "", port)
    if ufw == "drops":
        return Walls(
            blocks=(f"ufw is on, and no rule of it allows port {port}",),
            todo=f"sudo ufw allow {port}/tcp, and sudo ufw allow 5353/udp",
        )
    if ufw == "unknown":
        return Walls(unseen="ufw is on; what it allows needs root: sudo ufw status")
    if ufw == "lets through":
        return Walls()  # its own chains drop all but what others accept, which nft may not show
    if not is_root:
        missing = shutil.which("nft", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None
        return Walls(unseen="" if missing else "needs root: sudo nft list ruleset shows its rules")
    rules = await run_tool("nft", "-j", "list", "ruleset")
    return Walls(
        blocks=tuple(read_nftables(rules, port)),
        todo=f"let TCP port {port} and UDP port 5353 through in that chain",
    )


async def look_at_sleep() -> SleepFacts:
    """Return when this machine falls asleep by itself."""
    if sys.platform == "darwin":
        return read_pmset(await run_tool("pmset", "-g"))
    if not _SYSTEMD.is_dir():
        return SleepFacts(unseen="without systemd nothing is known of sleep")
    if (
        await run_tool("systemctl", "show", "--property=LoadState", "--value", "sleep.target")
        == "masked\n"
    ):
        return SleepFacts()
    return read_logind(await run_tool("systemd-analyze", "cat-config", "systemd/logind.conf"))
