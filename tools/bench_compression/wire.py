"""What leaves a host of a network lab, counted by its interface: all headers are in."""

from tools.bench_peers.places import Place

_COUNTER = "/sys/class/net/eth0/statistics/tx_bytes"


def sent_bytes(place: Place) -> int:
    """By all hosts together, since the lab was made; 0 on loopback.

    Acknowledgements, heartbeats and mDNS count as well. The kernel hands the interface segments of
    up to 64 KiB with one header, as it does for a network card that cuts them.
    """
    return sum(int(host.run(["cat", _COUNTER])) for host in place.hosts)
