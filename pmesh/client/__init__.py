"""What a training script imports: blocking, without an event loop."""

import logging

from pmesh.texts import printable


def _make_printable(record: logging.LogRecord) -> bool:
    """Other machines have written parts of what the logger `pmesh` says, such as reasons."""
    record.msg, record.args = printable(record.getMessage()), ()
    return True


logging.getLogger("pmesh").addFilter(_make_printable)
