"""`pmesh metrics`: what `pmesh status` shows, for Prometheus and what reads the same format.

A program of its own asks the agent whenever somebody asks it. So the agent serves no HTTP, and what
goes wrong here can't reach it.
"""

import errno
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Final, get_args

import msgspec
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from pmesh.agent.events import EventKind, EventPage
from pmesh.agent.host_port import host_port_text, parse_host_port
from pmesh.agent.schema import JobState, JobStatus, Status, decode_status
from pmesh.cli.event_reader import Reader
from pmesh.client.control import ask_status
from pmesh.errors import ConfigError, PmeshError, PortTaken
from pmesh.home_paths import home_directory
from pmesh.terminal.lines import say

MBIT_BYTES: Final = 125_000


class AgentCollector(Collector):
    """Asks an agent for its status and its new events, once for each scrape."""

    def __init__(self, status: Callable[[], Status], events: Callable[[], EventPage]) -> None:
        """Both raise PmeshError while no agent answers; `events` returns each event once."""
        self._status = status
        self._events = events
        # Each kind from 0 on: of a counter that begins with 1, nobody sees the increase.
        self._seen = Counter[str](dict.fromkeys(get_args(EventKind), 0))
        self._lock = threading.Lock()  # two may scrape at the same time

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; while no agent answers, only that."""
        with self._lock:
            try:
                status = self._status()
                self._seen.update(event.kind for event in self._events().events)
            except PmeshError:
                yield _gauge("up", "Whether the agent answers.", [((), 0)])
                return
            yield _gauge("up", "Whether the agent answers.", [((), 1)])
            seen = dict(self._seen)
        yield _counter("events", "As in pmesh events, from the oldest there.", _of(seen), "kind")
        yield from metrics_of(status)


Samples = Iterable[tuple[tuple[str, ...], float | None]]
"""Label values and a value; None is left out."""


def _gauge(name: str, what: str, samples: Samples, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(f"pmesh_{name}", what, labels=labels), samples)


def _counter(name: str, what: str, samples: Samples, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(f"pmesh_{name}", what, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples:
        if value is not None:
            family.add_metric(labels, value)
    return family


def _of(counts: Mapping[str, int]) -> Samples:
    return [((kind,), count) for kind, count in sorted(counts.items())]


def metrics_of(status: Status) -> Iterator[Metric]:
    """Yield what a status says, in base units: seconds, bytes, ratios."""
    node = status.node
    about = {"version": status.version, "protocol": str(status.protocol)}
    about |= {"name": node.name, "node": node.id}
    yield InfoMetricFamily("pmesh_agent", "Of this machine.", value=about)
    yield _gauge("uptime_seconds", "Since the agent started.", [((), status.uptime_s)])
    yield _gauge(
        "loop_lag_seconds",
        "How late the agent's event loop was, at most, in the last seconds.",
        [((), status.loop_lag_ms / 1e3)],
    )
    yield from _of_the_mesh(status)
    yield from _of_jobs(status.jobs)
    yield _durations(status)
    traffic, door = msgspec.structs.asdict(status.traffic), msgspec.structs.asdict(status.door)
    del door["pending"]
    for way in ("sent", "received"):
        yield _counter(
            f"{way}_bytes",
            "At the sockets, with headers and encryption.",
            [((what,), traffic[f"{what}_{way}_bytes"]) for what in ("control", "data")],
            "what",
        )
    yield _counter(
        "door_connections",
        "Connections to the agent's port, and those that were closed there, by reason.",
        _of(door),
        "outcome",
    )
    yield _counter(
        "turned_away",
        "Of strangers, and of programs of this machine.",
        _of(msgspec.structs.asdict(status.turned_away)),
        "what",
    )


def _durations(status: Status) -> Metric:
    found = HistogramMetricFamily(
        "pmesh_op_duration_seconds",
        "Of collective calls of this machine's ranks, waiting for others included.",
        labels=("kind", "up_to_bytes"),
    )
    for each in status.op_durations:
        bounds = (*map(str, status.duration_bounds_s), "+Inf")
        buckets = list(zip(bounds, accumulate(each.counts), strict=False))
        size = "+Inf" if each.up_to_bytes is None else str(each.up_to_bytes)
        found.add_metric((each.kind, size), buckets, each.total_s)
    return found


def _of_the_mesh(status: Status) -> Iterator[Metric]:
    members = status.view.members
    named = {member.id: member.name for member in members}
    yield _gauge("members", "Machines in the view.", [((), len(members))])
    yield _gauge("view_epoch", "It grows with each change.", [((), status.view.epoch.counter)])
    yield _gauge(
        "member_healthy",
        "0 for a member that is suspected, slow to answer or gone.",
        [((m.name,), m.health in {"self", "healthy"}) for m in members],
        "member",
    )
    yield _gauge(
        "member_rtt_seconds",
        "Round trip to a member.",
        [((m.name,), None if m.rtt_ms is None else m.rtt_ms / 1e3) for m in members],
        "member",
    )
    yield _gauge(
        "member_loss_ratio",
        "Of the probes to a member.",
        [((m.name,), None if m.loss_percent is None else m.loss_percent / 100) for m in members],
        "member",
    )
    yield _gauge(
        "edge_bytes_per_second",
        "Measured from each member to the next one in the ring.",
        [
            (
                (named[e.sender], named[e.receiver]),
                None if e.mbit_s is None else e.mbit_s * MBIT_BYTES,
            )
            for e in status.view.edges
        ],
        "sender",
        "receiver",
    )
    yield _gauge(
        "peers",
        "Machines that were found or are dialled, by what has become of it.",
        _of(Counter(peer.state for peer in status.peers)),
        "state",
    )


def _of_jobs(jobs: Iterable[JobStatus]) -> Iterator[Metric]:
    states = StateSetMetricFamily("pmesh_job_state", "Of each job.", labels=[_JOB])
    for job in jobs:
        states.add_metric([job.name], {state: state == job.state for state in get_args(JobState)})
    yield states
    for name, what, value in _JOB_GAUGES:
        yield _gauge(f"job_{name}", what, [((job.name,), value(job)) for job in jobs], _JOB)
    ranks = [((job.name, str(rank.rank), rank.name), rank) for job in jobs for rank in job.ranks]
    yield _counter(
        "rank_ops",
        "Collective ops that a rank has completed.",
        [(labels, rank.completed + 1) for labels, rank in ranks],
        *_RANK_LABELS,
    )
    yield _gauge(
        "rank_own_ratio",
        "Of the last seconds, outside collective calls: the others wait for the highest.",
        [(labels, _ratio(rank.own_percent)) for labels, rank in ranks],
        *_RANK_LABELS,
    )
    yield _gauge(
        "rank_share_ratio",
        "Of each batch, where rows are dealt by measured speed.",
        [(labels, _ratio(rank.share_percent)) for labels, rank in ranks],
        *_RANK_LABELS,
    )
    yield _gauge(
        "rank_report",
        "The last number that a rank has given to mesh.report; at most 8 names a rank.",
        [
            ((*labels, name), float(value))  # a text is nan, inf or -inf
            for labels, rank in ranks
            for name, value in rank.reports.items()
        ],
        *_RANK_LABELS,
        "report",
    )


_JOB: Final = "job_name"  # "job" is Prometheus' own
_RANK_LABELS: Final = (_JOB, "rank", "member")
_JOB_GAUGES: Final[tuple[tuple[str, str, Callable[[JobStatus], float | None]], ...]] = (
    ("ranks", "Trainers that take part.", lambda job: len(job.ranks)),
    ("newcomers", "Trainers that wait to take part.", lambda job: len(job.newcomers)),
    ("step", "mesh.step of the foremost rank.", lambda job: job.step),
    ("steps_per_second", "Over the last seconds.", lambda job: job.steps_per_s),
    ("ops_per_second", "Collective ops, over the last seconds.", lambda job: job.ops_per_s),
)


def _ratio(percent: int | None) -> float | None:
    return None if percent is None else percent / 100


def serve_metrics(home: Path | None, listen: str) -> int:
    """Serve until Ctrl-C, whether or not an agent runs.

    Raises:
        PortTaken: Another program listens there.
        ConfigError: `listen` is no HOST:PORT, or not of this machine.
    """
    directory = home_directory(home)
    try:
        host, port = parse_host_port(listen)
    except ValueError as e:
        raise ConfigError(f"--listen: {e}") from e
    registry = CollectorRegistry()
    registry.register(
        AgentCollector(lambda: decode_status(ask_status(directory)), Reader(directory).read)
    )
    try:
        # An empty host is every address of this machine; prometheus-client would look it up.
        server, thread = start_http_server(port, host or "0.0.0.0", registry)  # noqa: S104
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise PortTaken(f"port {port} is taken: choose another one with --listen") from e
        raise ConfigError(f"can't listen at {host}: {e.strerror or e}") from e
    where = host_port_text(host or socket.gethostname(), server.server_port)
    say(f"Metrics of {directory}: http://{where}/metrics")
    try:
        thread.join()
    finally:
        server.shutdown()
        server.server_close()
    return 0
