"""A worker that speaks entrenar's protocol byte by byte, and knows nothing of pmesh.

Its gradients have two blocks, of two components each, and the three other components; all values
of a part are equal. As a program:

    python worker.py PORT STEPS [FAULT STEP PART]

prints what each part of each step was averaged to. FAULT is `kill` (before this part is sent),
`nan` (in it), or `short` (a value is missing).
"""

import json
import os
import signal
import socket
import struct
import sys
from typing import Final, Self

PARTS: Final = ("block 1", "block 0", "head", "norm", "embedding")
SIZES: Final = {"block 0": (2, 1), "block 1": (3, 1), "head": (5,), "norm": (1,), "embedding": (2,)}


class RawWorker:
    """A worker, which has joined."""

    def __init__(self, port: int, name: str = "node") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        encoded = name.encode()
        self.send(
            b"\x01" + struct.pack("<I", len(encoded)) + encoded + struct.pack("<II", 1, 3) + b"cpu"
        )
        accepted = self.receive()
        assert accepted[0] == 2
        self.id, self.total = struct.unpack("<II", accepted[1:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, payload: bytes) -> None:
        """Send one frame."""
        self.socket.sendall(struct.pack(">I", len(payload)) + payload)

    def receive(self) -> bytes:
        """Return the payload of the next frame; empty if there is none."""
        head = self._exactly(4)
        return self._exactly(struct.unpack(">I", head)[0]) if head else b""

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            if not more:
                assert not data
                break
            data += more
        return data

    def value(self, step: int, part: str) -> float:
        """Its gradient of a part; means of two to six of these are exact."""
        return 60.0 * float(10 * self.id + step + PARTS.index(part))

    def send_part(self, step: int, part: str, fault: str = "") -> None:
        """Send its gradient of a part."""
        sizes = SIZES[part]
        values = [self.value(step, part)] * sum(sizes)
        if fault == "nan":
            values[1] = float("nan")
        if fault == "short":
            values.pop()
        floats = struct.pack(f"<Q{len(values)}f", len(values), *values)
        if part.startswith("block"):
            head = struct.pack("<BQIII", 8, step, self.id, int(part[-1]), 2)
            self.send(head + struct.pack(f"<I{len(sizes)}I", len(sizes), *sizes) + floats)
        else:
            self.send(struct.pack("<BQIB", 10, step, self.id, PARTS.index(part) - 2) + floats)

    def receive_part(self, step: int, part: str) -> float:
        """Return what a part was averaged to."""
        sizes = SIZES[part]
        got = self.receive()
        if part.startswith("block"):
            head = struct.pack("<BQI", 9, step, int(part[-1]))
            head += struct.pack(f"<I{len(sizes)}I", len(sizes), *sizes)
        else:
            head = struct.pack("<BQB", 11, step, PARTS.index(part) - 2)
        assert got[: len(head)] == head, got
        count, *values = struct.unpack(f"<Q{sum(sizes)}f", got[len(head) :])
        assert count == sum(sizes)
        assert values == [values[0]] * count
        return float(values[0])


def main(port: str, steps: str, fault: str = "", at_step: str = "-1", at_part: str = "") -> None:
    """Train so many steps, and print all means."""
    with RawWorker(int(port), f"node-{fault or 'good'}") as worker:
        for step in range(int(steps)):
            means = []
            for part in PARTS:
                wrong = fault if (step, part) == (int(at_step), at_part) else ""
                if wrong == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                worker.send_part(step, part, wrong)
                if wrong:
                    assert worker.receive() == b""
                    return
                means.append(worker.receive_part(step, part))
            print(json.dumps([step, means]), flush=True)  # noqa: T201 - a program


if __name__ == "__main__":
    main(*sys.argv[1:])
