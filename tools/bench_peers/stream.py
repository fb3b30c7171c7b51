"""A plain TCP stream between two processes: what this machine's loopback carries.

python stream.py PORT SECONDS     the sender
"""

import socket
import subprocess
import sys
import time
from pathlib import Path

CHUNK_BYTES = 1 << 20
STREAM_S = 0.5
PATIENCE_S = 30.0


def stream_bytes_per_s(seconds: float = STREAM_S) -> float:
    """From another process to this one, without any framing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        port = str(listener.getsockname()[1])
        with subprocess.Popen([sys.executable, str(Path(__file__)), port, str(seconds)]) as sender:
            try:
                connection, _ = listener.accept()
                with connection:
                    return _receive(connection)
            finally:
                sender.kill()


def _receive(connection: socket.socket) -> float:
    buffer = bytearray(CHUNK_BYTES)
    connection.recv_into(buffer)  # from here on it flows
    began, received = time.perf_counter(), 0
    while count := connection.recv_into(buffer):
        received += count
    return received / (time.perf_counter() - began)


def _send(port: int, seconds: float) -> None:
    chunk = bytes(CHUNK_BYTES)
    until = time.perf_counter() + seconds
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while time.perf_counter() < until:
            connection.sendall(chunk)


if __name__ == "__main__":
    _send(int(sys.argv[1]), float(sys.argv[2]))
