"""Reads what the system's tools print: those of Apple, of ufw, systemd and iproute2."""

import re
from typing import Final, Literal, NamedTuple

from pmesh.cli.doctor.rules.slow import SleepFacts

_KEPT_AWAKE: Final = re.compile(r"caffeinate|pmesh")


def read_pmset(text: str) -> SleepFacts:
    r"""Read `pmset -g`, which prints the settings in force (pmset(1)).

    >>> read_pmset(" sleep                1\n lowpowermode         0").after
    '1 minute without input'
    >>> read_pmset(" sleep                1 (sleep prevented by caffeinate)").after
    ''
    """
    settings = dict(re.findall(r"^ (\w+) +(\S.*?) *$", text, re.MULTILINE))
    minutes, _, prevented = settings.get("sleep", "").partition(" ")
    if not minutes.isdecimal():
        return SleepFacts(unseen="'pmset -g' does not say when this Mac falls asleep")
    awake = minutes == "0" or _KEPT_AWAKE.search(prevented) is not None
    return SleepFacts(
        after="" if awake else f"{minutes} minute{'s' * (minutes != '1')} without input",
        todo="caffeinate -i pmesh run …, or for ever: sudo pmset -a sleep 0",
        low_power=settings.get("lowpowermode") == "1",
    )


def read_logind(text: str) -> SleepFacts:
    r"""Read `systemd-analyze cat-config systemd/logind.conf`, of which the last lines count.

    >>> read_logind("#IdleAction=suspend\nIdleAction=suspend\nIdleActionSec=20min").after
    '20min without input (IdleAction=suspend)'
    """
    assigned = r"^(IdleAction|IdleActionSec)[ \t]*=[ \t]*(\S.*?)[ \t]*$"
    settings = dict(re.findall(assigned, text, re.MULTILINE))
    action = settings.get("IdleAction", "ignore")
    if action in {"ignore", "lock"}:
        return SleepFacts()
    return SleepFacts(
        after=f"{settings.get('IdleActionSec', '30min')} without input (IdleAction={action})",
        todo="sudo systemctl mask sleep.target suspend.target hibernate.target",
    )


class MacFirewall(NamedTuple):
    """The state of macOS's firewall."""

    is_on: bool
    blocks_all: bool


def read_socketfilterfw(text: str) -> MacFirewall | None:
    """Read `socketfilterfw --getglobalstate --getblockall`; None if it says nothing.

    >>> read_socketfilterfw("Firewall is enabled. (State = 1)")
    MacFirewall(is_on=True, blocks_all=False)
    """
    state = re.search(r"\(State = (\d)\)", text)
    if state is None:
        return None
    blocks = re.search(r"block all.*\b(enabled|disabled)", text, re.IGNORECASE)
    everything = state[1] == "2" or (blocks is not None and blocks[1].lower() == "enabled")
    return MacFirewall(is_on=state[1] != "0", blocks_all=everything)


UfwState = Literal["off", "lets through", "drops", "unknown"]


def read_ufw(configuration: str, status: str, port: int) -> UfwState:
    """Read /etc/ufw/ufw.conf, and `ufw status verbose`, which needs root; "" if there is none."""
    if not re.search(r"^ENABLED=yes", configuration, re.MULTILINE | re.IGNORECASE):
        return "off"
    if "Status: active" not in status:
        return "unknown"
    by_default = re.search(r"^Default: allow \(incoming\)", status, re.MULTILINE)
    allowed = re.findall(r"^(\S.*?) +(?:ALLOW|LIMIT)\b(?! +(?:OUT|FWD))", status, re.MULTILINE)
    return "lets through" if by_default or any(_is_to(port, to) for to in allowed) else "drops"


def _is_to(port: int, to: str) -> bool:
    """Return True if a rule of ufw for these ports of IPv4 is for this one.

    >>> _is_to(24160, "80,24000:25000/tcp on eth0"), _is_to(24160, "Anywhere"), _is_to(1, "2")
    (True, True, False)
    """
    ports, _, protocol = to.partition(" ")[0].partition("/")
    if protocol not in {"", "tcp"} or "(v6)" in to:
        return False
    ranges = re.findall(r"(?:^|,)(\d+)(?::(\d+))?(?=,|$)", ports)
    return ports == "Anywhere" or any(int(a) <= port <= int(b or a) for a, b in ranges)
