"""What a training script imports. Its calls block, and there is no event loop."""

import logging

from pmesh.texts import printable


def _make_printable(record: logging.LogRecord) -> bool:
    """Escape what does not print: other machines wrote parts of the log messages."""
    record.msg, record.args = printable(record.getMessage()), ()
    return True


logging.getLogger("pmesh").addFilter(_make_printable)
