"""What the tools of the system print, as they print it."""

import json
from typing import Any

import pytest

from pmesh.cli.doctor.rules.nftables import read_nftables
from pmesh.cli.doctor.rules.outputs import (
    MacFirewall,
    read_logind,
    read_pmset,
    read_socketfilterfw,
    read_ufw,
)

PMSET = """System-wide power settings:
Currently in use:
 standby              1
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 networkoversleep     0
 disksleep            10
 sleep                {sleep}
 hibernatemode        3
 ttyskeepawake        1
 displaysleep         2
 tcpkeepalive         1
 lowpowermode         {low}
 womp                 1
"""


@pytest.mark.parametrize(
    ("sleep", "after"),
    [
        ("0", ""),
        ("1", "1 minute without input"),
        ("10 (sleep prevented by powerd, sharingd)", "10 minutes without input"),
        ("10 (sleep prevented by powerd, caffeinate)", ""),
    ],
)
def test_a_mac_falls_asleep_when_pmset_says_it(sleep: str, after: str) -> None:
    assert read_pmset(PMSET.format(sleep=sleep, low=0)).after == after


def test_low_power_mode_is_seen_and_other_output_is_not_understood() -> None:
    assert read_pmset(PMSET.format(sleep=0, low=1)).low_power
    assert not read_pmset(PMSET.format(sleep=0, low=0)).low_power
    assert "does not say" in read_pmset("").unseen


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Firewall is disabled. (State = 0)\n", MacFirewall(is_on=False, blocks_all=False)),
        ("Firewall is enabled. (State = 1)\n", MacFirewall(is_on=True, blocks_all=False)),
        (
            "Firewall is blocking all non-essential incoming connections. (State = 2)\n",
            MacFirewall(is_on=True, blocks_all=True),
        ),
        (
            "Firewall is enabled. (State = 1)\nFirewall has block all state set to enabled.\n",
            MacFirewall(is_on=True, blocks_all=True),
        ),
        (
            "Firewall is enabled. (State = 1)\nFirewall has block all state set to disabled.\n",
            MacFirewall(is_on=True, blocks_all=False),
        ),
        ("Block all DISABLED!\n", None),
    ],
)
def test_the_state_of_macos_s_firewall_is_read(text: str, found: MacFirewall | None) -> None:
    assert read_socketfilterfw(text) == found


UFW = """Status: active

To                         Action      From
--                         ------      ----
22/tcp                     ALLOW       Anywhere
{rule}
"""


@pytest.mark.parametrize(
    ("conf", "status", "state"),
    [
        ("", "", "off"),
        ("ENABLED=no\n", "", "off"),
        ("# ufw\nENABLED=yes\n", "", "unknown"),
        ("ENABLED=yes\n", UFW.format(rule=""), "drops"),
        ("ENABLED=yes\n", UFW.format(rule="24160/tcp                  ALLOW  X"), "lets through"),
        ("ENABLED=yes\n", UFW.format(rule="24160                      ALLOW  X"), "lets through"),
        ("ENABLED=yes\n", UFW.format(rule="24160/tcp                  DENY   X"), "drops"),
        ("ENABLED=yes\n", UFW.format(rule="24000:25000/tcp            ALLOW  X"), "lets through"),
        ("ENABLED=yes\n", UFW.format(rule="80,24160/tcp               ALLOW  X"), "lets through"),
        ("ENABLED=yes\n", UFW.format(rule="24160/tcp on eth0          ALLOW IN X"), "lets through"),
        ("ENABLED=yes\n", UFW.format(rule="Anywhere on eth0           ALLOW  X"), "lets through"),
        ("ENABLED=yes\n", UFW.format(rule="Anywhere/tcp               LIMIT  X"), "lets through"),
        ("ENABLED=yes\n", UFW.format(rule="24000:24100/tcp            ALLOW  X"), "drops"),
        ("ENABLED=yes\n", UFW.format(rule="24000:25000/udp            ALLOW  X"), "drops"),
        ("ENABLED=yes\n", UFW.format(rule="24160/tcp                  ALLOW OUT  X"), "drops"),
        ("ENABLED=yes\n", UFW.format(rule="24160/tcp (v6)             ALLOW  X (v6)"), "drops"),
        ("ENABLED=yes\n", "Status: active\nDefault: allow (incoming), allow (outgoing)\n",
         "lets through"),
        ("ENABLED=yes\n", "Status: active\nDefault: deny (incoming), allow (outgoing)\n", "drops"),
    ],
)  # fmt: skip
def test_ufw_lets_through_what_it_allows(conf: str, status: str, state: str) -> None:
    assert read_ufw(conf, status, 24160) == state


def test_logind_sends_a_machine_to_sleep_only_if_it_is_told_to() -> None:
    assert read_logind("").after == ""
    assert read_logind("#IdleAction=suspend\n").after == ""
    assert read_logind("IdleAction=suspend\nIdleAction=lock\n").after == ""
    spaced = "IdleAction = suspend\nIdleActionSec = 1h 30min \n"
    assert read_logind(spaced).after == "1h 30min without input (IdleAction=suspend)"
    assert read_logind("IdleAction=suspend\n").after == "30min without input (IdleAction=suspend)"


def chain(hook: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    base = {"family": "inet", "table": "filter", "name": hook, "handle": 1}
    return {"chain": base | {"hook": hook, "prio": 0, "policy": "accept"} | more}


def rule(hook: str, *parts: object) -> dict[str, Any]:
    return {
        "rule": {"family": "inet", "table": "filter", "chain": hook, "handle": 4, "expr": parts}
    }


def to_port(right: object, field: str = "dport", op: str = "==") -> dict[str, Any]:
    left = {"payload": {"protocol": "tcp", "field": field}}
    return {"match": {"op": op, "left": left, "right": right}}


DROP, ACCEPT, REJECT = {"drop": None}, {"accept": None}, {"reject": {"type": "icmp"}}
OF_STATE = {
    "match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["established", "related"]}
}
FOR_US = "nftables drops connections to the agent, port 24160 (chain inet filter input)"
FOR_MDNS = "nftables drops mDNS, UDP port 5353 (chain inet filter input)"
FOR_ALL = "nftables drops what no rule accepts, such as port 24160 (chain inet filter input)"


@pytest.mark.parametrize(
    ("items", "found"),
    [
        ([{"metainfo": {"version": "1.0.6"}}], []),
        ([chain("input")], []),
        ([chain("input"), rule("input", to_port(24160), {"counter": {}}, DROP)], [FOR_US]),
        ([chain("input"), rule("input", to_port(24160, "sport"), DROP)], []),
        ([chain("input"), rule("input", to_port(22), DROP)], []),
        ([chain("input"), rule("input", to_port({"set": [22, 24160, 5353]}, op="!="), DROP)], []),
        ([chain("input"), rule("input", to_port({"range": [20000, 30000]}), REJECT)], [FOR_US]),
        ([chain("input"), rule("input", to_port({"range": [20000, 20001]}), REJECT)], []),
        ([chain("input"), rule("input", to_port({"set": [22, 24160, 5353]}), DROP)],
         [FOR_US, FOR_MDNS]),
        ([chain("input"), rule("input", to_port("224.0.0.251", "daddr"), DROP)], [FOR_MDNS]),
        ([chain("input"), rule("input", to_port({"range": ["a", "b"]}), DROP)], []),
        ([chain("input", policy="drop")], [FOR_ALL]),
        ([chain("input", policy="drop"), rule("input", OF_STATE, ACCEPT)], [FOR_ALL]),
        ([chain("input", policy="drop"), rule("open", to_port(24160), ACCEPT)], []),
        ([chain("input"), rule("input", {"counter": {}}, REJECT)], [FOR_ALL]),
        ([chain("input"), rule("input", {"xt": None}, DROP)], []),
        ([chain("forward", policy="drop")], []),
        (
            [chain("output"), rule("output", to_port(24160), DROP)],
            [
                (
                    "nftables drops connections to the agents of others, port 24160 "
                    "(chain inet filter output)"
                )
            ],
        ),
        ([chain("output", policy="drop")], []),
    ],
)  # fmt: skip
def test_chains_that_drop_what_an_agent_needs_are_found(
    items: list[dict[str, Any]], found: list[str]
) -> None:
    assert [*read_nftables(json.dumps({"nftables": items}), 24160)] == found


@pytest.mark.parametrize("text", ["", "[]", '{"nftables": 3}', '{"nftables": [{"rule": 3}]}'])
def test_output_of_another_nft_says_nothing(text: str) -> None:
    assert [*read_nftables(text, 24160)] == []
