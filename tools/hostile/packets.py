"""What a stranger says by mDNS: machines that it invents, junk, and copies of what it has heard."""

import ipaddress
import time
from dataclasses import dataclass
from random import Random
from typing import Final

from zeroconf._dns import DNSAddress, DNSPointer, DNSRecord, DNSService, DNSText
from zeroconf._protocol.outgoing import DNSOutgoing

from pmesh.core.identity import advertisement as adverts
from pmesh.core.identity.advertisement import SERVICE_TYPE, Advertisement
from pmesh.core.identity.keys import AdvertisementKey, NodeKey
from pmesh.ids import Incarnation, NodeId

GROUP: Final = ("224.0.0.251", 5353)
ADDRESSES: Final = 16  # of each machine that is invented
RECORDS: Final = ADDRESSES + 3  # with its PTR, SRV and TXT
# In the lab's subnet, and nobody's: nothing answers for the first, who connects to the others
# waits, as the attacker's host answers for their hardware address and drops the rest.
NOBODY: Final = tuple(f"10.77.0.{last}" for last in range(100, 128))
BLACK_HOLES: Final = tuple(f"10.77.0.{last}" for last in range(128, 250))
BLACK_HOLE_SUBNET: Final = "10.77.0.128/25"

_RESPONSE: Final = 0x8400  # QR and AA, RFC 6762 section 18
_A, _PTR, _TXT, _SRV = 1, 12, 16, 33
_IN, _FLUSH = 1, 0x8001
_TTL_S: Final = 4500


@dataclass(frozen=True, slots=True)
class HostileMachine:
    node: NodeId
    entries: dict[bytes, bytes]
    """Of its TXT record."""
    port: int
    hosts: tuple[str, ...]


def invent(random: Random, key: AdvertisementKey) -> HostileMachine:
    """A machine with the mesh's public tag; whoever lacks the mesh key makes up the secret."""
    node_key = NodeKey.from_seed(random.randbytes(32))
    hosts = random.sample(BLACK_HOLES, ADDRESSES * 3 // 4) + random.sample(NOBODY, ADDRESSES // 4)
    advertisement = Advertisement(
        tag=key.tag,
        node=node_key.node,
        incarnation=Incarnation(random.randrange(1, 2**63)),
        port=random.randrange(1024, 65536),
        name=f"mac-{random.randrange(1000)}",
        hosts=tuple(hosts),
        minute=int(time.time() // 60),
    )
    entries = adverts.encode(advertisement, node_key, key)
    return HostileMachine(node_key.node, entries, advertisement.port, tuple(hosts))


def announce(machine: HostileMachine, *, withdrawn: bool = False) -> bytes:
    """One packet with all records of the machine; a withdrawal has a lifetime of 0."""
    ttl = 0 if withdrawn else _TTL_S
    instance, host = adverts.instance_name(machine.node), adverts.host_name(machine.node)
    text = b"".join(
        bytes([len(name) + 1 + len(value)]) + name + b"=" + value
        for name, value in machine.entries.items()
    )
    return _packet(
        DNSPointer(SERVICE_TYPE, _PTR, _IN, ttl, instance),
        DNSService(instance, _SRV, _FLUSH, ttl, 0, 0, machine.port, host),
        DNSText(instance, _TXT, _FLUSH, ttl, text),
        *(
            DNSAddress(host, _A, _FLUSH, ttl, ipaddress.ip_address(address).packed)
            for address in machine.hosts
        ),
    )


def name_only(random: Random) -> bytes:
    """As many names as a machine has records, with nothing else: each has to be asked for."""
    names = (adverts.instance_name(NodeId(random.randbytes(32))) for _ in range(RECORDS))
    return _packet(*(DNSPointer(SERVICE_TYPE, _PTR, _IN, _TTL_S, name) for name in names))


def mutate(packet: bytes, random: Random) -> bytes:
    """A copy in which some bytes differ, or that ends too soon, or that goes on."""
    copy = bytearray(packet)
    for _ in range(random.randrange(1, 9)):
        copy[random.randrange(len(copy))] = random.randrange(256)
    match random.randrange(4):
        case 0:
            return bytes(copy[: random.randrange(len(copy))])
        case 1:
            return bytes(copy) + random.randbytes(random.randrange(1, 400))
        case _:
            return bytes(copy)


def question() -> bytes:
    """Asks all agents of the network to announce themselves."""
    # Built by hand: an outgoing question of zeroconf would be another object for 30 bytes.
    labels = b"".join(bytes([len(label)]) + label.encode() for label in SERVICE_TYPE.split("."))
    return bytes([0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]) + labels + bytes([0, _PTR, 0, _IN])


def _packet(*records: DNSRecord) -> bytes:
    outgoing = DNSOutgoing(_RESPONSE)
    for record in records:
        outgoing.add_answer_at_time(record, 0)
    (packet,) = outgoing.packets()
    return packet
