"""Flips bits in what crosses the network: every flip must be detected, none may change a sum.

On a lane, that is any bit of a stream of records: header, sealed body or tag. On a link, it is any
bit of the TLS records that carry a framed message.
"""

from random import Random
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pmesh.core.identity.certificates import issue_credentials
from pmesh.core.identity.keys import MeshKey, NodeKey
from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.records import (
    HEADER_BYTES,
    OVERHEAD_BYTES,
    Opener,
    RecordHeader,
    Sealer,
    read_header_untrusted,
)
from pmesh.errors import ProtocolError
from pmesh.net.links.tls import DataReceived, TlsContexts, TlsFailed, TlsProtocol
from tools.lab.campaign import CampaignRun, Tally

Sums: TypeAlias = list[NDArray[np.float32]]

RECORDS = 4  # one that is hit, and others, which a wrong length would swallow
VALUES = 64  # so that headers and tags make up a sixth of all bits
ON_LINKS = 50  # one flip in so many: a TLS handshake for each takes 5 ms
_RECORD_BYTES = 4 * VALUES + OVERHEAD_BYTES
_MESSAGE = bytes(range(200))


def run_bit_flips(run: CampaignRun) -> Tally:
    """So many flips (`--episodes`), each in a fresh stream, at a random bit of it."""
    random = run.random()
    tally = Tally(ops_checked=run.episodes)
    noticed: dict[str, int] = {}
    contexts = _two_nodes(random)
    for number in range(run.episodes):
        how = flip_on_lane(random) if number % ON_LINKS else flip_on_link(contexts, random)
        if how.startswith("NOT"):
            tally.violations.append(f"flip {number}: {how}")
        noticed[how] = noticed.get(how, 0) + 1
    tally.facts = {how: float(count) for how, count in sorted(noticed.items())}
    return tally


def flip_on_lane(random: Random) -> str:
    """How one flip in a stream of records was noticed; begins with NOT if it was not."""
    key = random.randbytes(32)
    values = np.frombuffer(random.randbytes(4 * VALUES * RECORDS), np.int8)[: VALUES * RECORDS]
    parts = values.astype(np.float32).reshape(RECORDS, VALUES)
    stream = seal_stream(key, parts)
    bit = random.randrange(len(stream) * 8)
    stream[bit // 8] ^= 1 << bit % 8
    sums, how = add_up(key, bytes(stream), np.ones(VALUES, np.float32))
    hit = bit // 8 // _RECORD_BYTES
    if any(not np.array_equal(total, part + 1) for total, part in zip(sums, parts, strict=False)):
        return f"NOT right: a wrong sum after bit {bit % (_RECORD_BYTES * 8)} of record {hit}"
    if len(sums) > hit:
        return f"NOT noticed: bit {bit % (_RECORD_BYTES * 8)} of record {hit}"
    return how


def add_up(key: bytes, stream: bytes, mine: NDArray[np.float32]) -> tuple[Sums, str]:
    """What a receiver adds to its own values, record by record, and what made it stop."""
    opener, at, sums = Opener(key), 0, list[NDArray[np.float32]]()
    while at < len(stream):
        try:
            header = read_header_untrusted(stream[at : at + HEADER_BYTES])
            end = at + OVERHEAD_BYTES + header.body_bytes
            if end > len(stream):
                return sums, "by what never came"  # the lane makes no progress, and is given up
            body = bytearray(header.body_bytes)
            opener.open_untrusted(memoryview(stream)[at:end], body)
        except ProtocolError as e:
            how = "by its length" if "claims" in str(e) else "by its seal"
            return sums, how
        with np.errstate(all="ignore"):  # if a flip went unnoticed, this may be no number
            sums.append(mine + np.frombuffer(body, np.float32))
        at = end
    return sums, "NOT noticed"


def flip_on_link(contexts: tuple[TlsContexts, TlsContexts], random: Random) -> str:
    """How one flip on a link was noticed; begins with NOT if its message arrived changed."""
    client = TlsProtocol(contexts[0], server_side=False)
    server = TlsProtocol(contexts[1], server_side=True)
    _shake_hands(client, server)
    client.send(frame(_MESSAGE))
    sent = bytearray(client.data_to_send())
    bit = random.randrange(len(sent) * 8)
    sent[bit // 8] ^= 1 << bit % 8
    server.receive_data(sent)
    server.receive_eof()
    reader = FrameReader(max_bytes=1 << 20)
    while isinstance(event := server.next_event(), DataReceived):
        reader.receive_data(event.data)
    if reader.buffered or event is None:
        return f"NOT noticed: bit {bit} of a link's bytes"
    return "by TLS" if isinstance(event, TlsFailed) else "by the link's end"


def seal_stream(key: bytes, parts: NDArray[np.float32]) -> bytearray:
    """A record for each part, as a lane carries them."""
    sealer, stream = Sealer(key), bytearray(_RECORD_BYTES * RECORDS)
    for number, part in enumerate(parts):
        into = memoryview(stream)[number * _RECORD_BYTES : (number + 1) * _RECORD_BYTES]
        sealer.seal(RecordHeader(4 * VALUES, 1, 7, number, 99, 6), part.tobytes(), into)
    return stream


def _two_nodes(random: Random) -> tuple[TlsContexts, TlsContexts]:
    mesh = MeshKey(random.randbytes(32))
    one, other = (
        TlsContexts.of(issue_credentials(mesh, NodeKey.from_seed(random.randbytes(32))))
        for _ in range(2)
    )
    return one, other


def _shake_hands(client: TlsProtocol, server: TlsProtocol) -> None:
    for _ in range(4):  # two flights each way are more than TLS 1.3 needs
        client.next_event()
        server.receive_data(client.data_to_send())
        server.next_event()
        client.receive_data(server.data_to_send())
