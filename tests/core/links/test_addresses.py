from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.links.addresses import (
    MAX_DIALLED,
    InterfaceKind,
    LocalAddress,
    announced_addresses,
    announced_interfaces,
    in_dialling_order,
    interface_of,
    interfaces_that_share_a_network,
)
from pmesh.core.wire.link import Address, PeerInterface


def local(
    interface: str, host: str, bits: int, kind: InterfaceKind, speed_mbit_s: int = 0
) -> LocalAddress:
    return LocalAddress(
        interface=interface,
        host=host,
        prefix_bits=bits,
        kind=kind,
        speed_mbit_s=speed_mbit_s,
    )


WIFI = local("en0", "192.168.1.5", 24, "wifi")
WIFI_LINK_LOCAL = local("en0", "fe80::5", 64, "wifi")
WIRED = local("en8", "10.0.0.5", 16, "wired")
THUNDERBOLT = local("bridge0", "169.254.7.7", 16, "thunderbolt")
THUNDERBOLT_LINK_LOCAL = local("bridge0", "fe80::5", 64, "thunderbolt")
LOOPBACK = local("lo0", "127.0.0.1", 8, "loopback")
ALL = (WIFI, WIFI_LINK_LOCAL, WIRED, THUNDERBOLT, THUNDERBOLT_LINK_LOCAL)


def ways(
    *hosts: str, own: tuple[LocalAddress, ...] = ALL, bind_all: bool = False
) -> list[tuple[str, str | None]]:
    """Return the addresses in the order in which they are dialled, and over which interface."""
    addresses = [Address(host, 1) for host in hosts]
    found = in_dialling_order(addresses, local=own, bind_all=bind_all)
    return [(address.host, None if via is None else via.interface) for address, via in found]


def order(*hosts: str, own: tuple[LocalAddress, ...] = ALL) -> list[str]:
    return [host for host, _ in ways(*hosts, own=own)]


def test_the_fastest_kind_of_interface_is_dialled_first() -> None:
    assert order("192.168.1.9", "10.0.3.9", "169.254.1.1") == [
        "169.254.1.1",
        "10.0.3.9",
        "192.168.1.9",
    ]


def test_addresses_behind_a_router_and_names_come_last_in_the_given_order() -> None:
    assert order("mac.local", "8.8.8.8", "192.168.1.9") == ["192.168.1.9", "mac.local", "8.8.8.8"]


def test_an_agent_on_this_machine_is_reached_over_loopback_first() -> None:
    assert order("192.168.1.5", "127.0.0.1", own=(WIFI, LOOPBACK)) == ["127.0.0.1", "192.168.1.5"]


def test_a_neighbour_is_dialled_over_the_interface_that_reaches_it() -> None:
    assert ways("169.254.1.1", "10.0.3.9", "8.8.8.8", "mac.local") == [
        ("169.254.1.1", "bridge0"),
        ("10.0.3.9", "en8"),
        ("8.8.8.8", None),
        ("mac.local", None),
    ]
    assert ways("fe80::9") == [("fe80::9%bridge0", "bridge0"), ("fe80::9%en0", "en0")]


def test_of_several_interfaces_in_its_network_each_is_tried_and_then_the_systems_choice() -> None:
    own = (
        local("en0", "192.168.1.5", 24, "wifi"),
        local("en1", "192.168.1.6", 24, "wired", 100),
        local("en2", "192.168.1.7", 24, "wired", 1000),
        local("en2", "192.168.1.8", 24, "wired", 1000),
    )
    assert ways("192.168.1.9", own=own) == [
        ("192.168.1.9", "en2"),
        ("192.168.1.9", "en1"),
        ("192.168.1.9", "en0"),
        ("192.168.1.9", None),
    ]


def test_this_machine_itself_is_dialled_over_no_interface() -> None:
    assert ways("192.168.1.5", "127.0.0.1", own=(WIFI, LOOPBACK)) == [
        ("127.0.0.1", None),
        ("192.168.1.5", None),
    ]


def test_what_both_machines_have_does_not_lead_from_one_to_the_other() -> None:
    """Both have the same bridge for virtual machines, with the same address."""
    bridge = local("vnic0", "10.211.55.2", 24, "wired"), local("vnic0", "fe80::2", 64, "wired")
    own = (WIFI, *bridge)
    assert order("10.211.55.2", "fe80::2", "192.168.1.9", own=own) == ["192.168.1.9"]
    assert order("192.168.1.5", "10.211.55.2", own=own) == ["10.211.55.2", "192.168.1.5"]


def test_a_vpn_is_dialled_last() -> None:
    own = (local("utun3", "100.64.0.5", 10, "vpn"), WIFI)
    assert order("100.64.0.9", "8.8.8.8", "192.168.1.9", own=own) == [
        "192.168.1.9",
        "8.8.8.8",
        "100.64.0.9",
    ]


def test_where_interfaces_are_forbidden_every_dial_is_bound_to_one_that_is_not() -> None:
    own = (WIFI, WIRED, THUNDERBOLT_LINK_LOCAL, LOOPBACK)
    assert ways("8.8.8.8", "10.0.3.9", "2001:db8::1", own=own, bind_all=True) == [
        ("10.0.3.9", "en8"),
        ("2001:db8::1", "bridge0"),
        ("8.8.8.8", "en8"),
        ("8.8.8.8", "en0"),
    ]
    assert ways("mac.local", own=own, bind_all=True) == [
        ("mac.local", "bridge0"),
        ("mac.local", "en8"),
        ("mac.local", "en0"),
    ]


def test_the_interface_of_a_connection_is_the_scope_of_its_end_or_has_its_address() -> None:
    assert interface_of(Address("10.0.0.5", 1), local=ALL) == WIRED
    assert interface_of(Address("10.0.0.5%en0", 1), local=ALL) == WIFI
    assert interface_of(Address("fe80::5%bridge0", 1), local=ALL) == THUNDERBOLT
    assert interface_of(Address("10.0.0.6", 1), local=ALL) is None


def test_interfaces_that_share_a_network_are_known() -> None:
    cable = local("en9", "169.254.8.8", 16, "wired")
    same_v6 = local("en9", "fe80::9", 64, "wired")
    assert interfaces_that_share_a_network((*ALL, cable)) == {"bridge0", "en9"}
    assert interfaces_that_share_a_network((*ALL, same_v6)) == set()
    assert interfaces_that_share_a_network((WIRED, local("en8", "10.0.0.6", 16, "wired"))) == set()
    assert interfaces_that_share_a_network((WIRED, local("en9", "10.0.0.6", 32, "wired"))) == {
        "en8",
        "en9",
    }


def test_a_link_local_address_is_tried_on_each_interface_that_has_one() -> None:
    assert order("fe80::9") == ["fe80::9%bridge0", "fe80::9%en0"]


def test_a_scope_of_another_machine_is_replaced_by_ours() -> None:
    assert order("fe80::9%eth7", own=(WIFI_LINK_LOCAL,)) == ["fe80::9%en0"]


def test_a_link_local_address_can_not_be_dialled_without_a_link_local_interface() -> None:
    assert order("fe80::9", own=(WIFI,)) == []


def test_addresses_that_nobody_has_are_left_out() -> None:
    assert order("0.0.0.0", "::", "224.0.0.251", "ff02::fb") == []  # noqa: S104 - refused


def test_an_address_given_twice_is_dialled_once() -> None:
    assert order("10.0.0.9", "10.0.0.9", "::ffff:10.0.0.9").count("10.0.0.9") == 1


def test_a_peer_that_claims_thousands_of_addresses_costs_sixteen_dials() -> None:
    assert len(order(*(f"10.0.{i // 250}.{i % 250}" for i in range(3000)))) == MAX_DIALLED


def test_others_are_told_no_scopes_and_nothing_twice() -> None:
    assert announced_addresses(ALL, port=24160) == (
        Address("169.254.7.7", 24160),
        Address("fe80::5", 24160),
        Address("10.0.0.5", 24160),
        Address("192.168.1.5", 24160),
    )


@given(
    hosts=st.lists(
        st.text(max_size=30) | st.ip_addresses().map(str) | st.just("fe80::1%x"), max_size=5
    )
)
def test_no_host_that_a_peer_claims_can_raise(hosts: list[str]) -> None:
    assert len(order(*hosts)) <= MAX_DIALLED


def test_interfaces_are_announced_with_all_their_addresses() -> None:
    local = [
        LocalAddress(interface="en0", host="10.0.0.1", prefix_bits=24, kind="wired"),
        LocalAddress(
            interface="bridge0",
            host="169.254.1.1",
            prefix_bits=16,
            kind="thunderbolt",
            speed_mbit_s=40_000,
        ),
        LocalAddress(interface="en0", host="fd00::1", prefix_bits=64, kind="wired"),
    ]
    assert announced_interfaces(local) == (
        PeerInterface("en0", "wired", 0, ("10.0.0.1", "fd00::1")),
        PeerInterface("bridge0", "thunderbolt", 40_000, ("169.254.1.1",)),
    )
