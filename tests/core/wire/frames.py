"""Frames of lanes over several connections, for the tests of their two windows."""

from pmesh.core.wire.subflows import NUMBER_BYTES, frame_bytes, put_number


def frame(number: int, body_bytes: int = 0) -> memoryview:
    """A record as the windows see it: a number in front, and bytes that tell it from others."""
    view = memoryview(bytearray(frame_bytes(body_bytes)))
    put_number(number, view)
    view[NUMBER_BYTES:] = bytes([number % 251]) * (len(view) - NUMBER_BYTES)
    return view
