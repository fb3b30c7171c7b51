"""Logs: the same calls write lines for a person or JSON lines for a machine."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final, TextIO

import structlog

from pmesh.agent.config import LogLevel

MOST_LINES: Final = 30  # of one kind in a minute
THROTTLE_S: Final = 60.0
MAX_KINDS: Final = 256

_LEVELS: Final[Mapping[LogLevel, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def set_up_logs(*, level: LogLevel, as_json: bool, stream: TextIO) -> None:
    """Send structlog's events, and the logs of libraries, to the stream.

    Libraries log from `warning` up, unless `level` is higher: zeroconf's `info` is not useful.
    """
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer = _renderer(as_json=as_json, colors=stream.isatty())
    last: list[structlog.typing.Processor] = [*_exceptions(as_json=as_json), renderer]
    structlog.configure(
        processors=[Throttle(clock=time.monotonic), *shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,  # tests set up more than once; no logger is on a hot path
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(_LEVELS[level], logging.WARNING), force=True)
    logging.getLogger("zeroconf").setLevel(logging.NOTSET)  # its import sets a level


class Throttle:
    """Drops lines of one kind beyond thirty a minute: a peer must not fill the disk.

    The first line of the next minute says how many were dropped.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        """`clock` is monotonic, in seconds."""
        self._clock = clock
        self._lines: OrderedDict[str, tuple[float, int]] = OrderedDict()  # since when, how many

    def __call__(
        self, logger: object, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """Process an event of structlog. Raises DropEvent."""
        del logger, method
        kind, now = str(event.get("event")), self._clock()
        since, count = self._lines.pop(kind, (now, 0))
        if now - since >= THROTTLE_S:
            if count > MOST_LINES:
                event["dropped"] = count - MOST_LINES
            since, count = now, 0
        self._lines[kind] = since, count + 1
        if len(self._lines) > MAX_KINDS:
            self._lines.popitem(last=False)
        if count >= MOST_LINES:
            raise structlog.DropEvent
        return event


def _renderer(*, as_json: bool, colors: bool) -> structlog.typing.Processor:
    if as_json:
        return structlog.processors.JSONRenderer()
    return structlog.dev.ConsoleRenderer(
        colors=colors, exception_formatter=structlog.dev.plain_traceback
    )


def _exceptions(*, as_json: bool) -> list[structlog.typing.Processor]:
    """JSON carries a traceback as data; the console renderer formats it itself.

    Neither shows the values of variables, as both would by default: some are keys.
    """
    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(tracebacks)] if as_json else []
