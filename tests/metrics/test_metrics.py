"""`pmesh metrics`: what a status says as metrics; the alerts and the dashboard that go with it."""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from pmesh.agent.events import EVENTS_SCHEMA_VERSION, Event, EventKind, EventPage
from pmesh.agent.schema import EdgeStatus, JobStatus, OpDurationsStatus, RankStatus, Status
from pmesh.cli.app import run
from pmesh.cli.metrics import AgentCollector
from pmesh.errors import AgentNotRunning
from tests.docs.pages import DOCS, ROOT, code_in, read, table_rows
from tests.worlds.fake_status_agent import IDS, SNAPSHOT
from tests.worlds.faults import Faults, Real

PACKAGING = ROOT / "packaging" / "prometheus"
RULES = PACKAGING / "alerts.yml"

RANK = RankStatus(
    rank=0,
    trainer=0,
    node=IDS[0],
    name="mac-1",
    started=41,
    completed=40,
    own_percent=96,
    share_percent=75,
    reports={"loss": 0.5, "eval/loss": "nan", "lr": "-inf"},
)
JOB = JobStatus(
    name="digits",
    state="no_quorum",
    wait_for=None,
    ranks=(RANK,),
    newcomers=(),
    step=20,
    steps_per_s=3.9,
    ops_per_s=7.8,
)
EDGE = EdgeStatus(
    sender=SNAPSHOT.view.members[0].id, receiver=SNAPSHOT.view.members[1].id, rtt_ms=0.3, mbit_s=940
)
VIEW = msgspec.structs.replace(SNAPSHOT.view, edges=(EDGE,))
STATUS = msgspec.structs.replace(
    SNAPSHOT,
    jobs=(JOB,),
    view=VIEW,
    duration_bounds_s=(0.0001, 0.01),
    op_durations=(
        OpDurationsStatus(kind="all_reduce", up_to_bytes=4096, counts=(1, 2, 3), total_s=4.5),
        OpDurationsStatus(kind="barrier", up_to_bytes=None, counts=(0, 0, 1), total_s=2.0),
    ),
)

BOUNDS = ("0.0001", "0.01", "+Inf")

Found = Mapping[tuple[str, tuple[str, ...]], float]
"""By the name of a sample, without `pmesh_`, and its label values."""


def page(*kinds: EventKind) -> EventPage:
    at = datetime(2026, 11, 22, tzinfo=UTC)
    events = tuple(
        Event(number=n, time=at, uptime_s=n, kind=k, text="text") for n, k in enumerate(kinds)
    )
    return EventPage(
        schema=EVENTS_SCHEMA_VERSION,
        node="x",
        name="mac-1",
        incarnation="0" * 16,
        next=len(events),
        events=events,
    )


def scraped(collector: AgentCollector) -> Found:
    registry = CollectorRegistry()
    registry.register(collector)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name.removeprefix("pmesh_"), tuple(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def metrics_of(status: Status) -> Found:
    return scraped(AgentCollector(lambda: status, page))


def test_numbers_are_in_base_units_and_under_the_names_of_their_machines() -> None:
    found = metrics_of(STATUS)
    assert found["up", ()] == 1
    assert found["members", ()] == len(STATUS.view.members)
    for member in STATUS.view.members:
        well = member.health in {"self", "healthy"}
        assert found["member_healthy", (member.name,)] == well
        if member.rtt_ms is not None:
            assert found["member_rtt_seconds", (member.name,)] == member.rtt_ms / 1000
    assert found["rank_ops_total", ("digits", "mac-1", "0")] == 41
    assert found["rank_own_ratio", ("digits", "mac-1", "0")] == 0.96
    assert found["rank_share_ratio", ("digits", "mac-1", "0")] == 0.75
    reports = {labels[3]: value for (name, labels), value in found.items() if name == "rank_report"}
    assert (reports["loss"], reports["lr"]) == (0.5, -math.inf)
    assert math.isnan(reports["eval/loss"])
    assert found["job_state", ("digits", "no_quorum")] == 1
    assert found["job_state", ("digits", "running")] == 0
    assert found["edge_bytes_per_second", ("mac-2", "mac-1")] == 117.5e6
    assert found["sent_bytes_total", ("data",)] == STATUS.traffic.data_sent_bytes
    assert found["door_connections_total", ("refused",)] == STATUS.door.refused


def test_durations_of_ops_are_a_histogram_for_each_kind_and_size() -> None:
    found = metrics_of(STATUS)
    name = "op_duration_seconds"
    within = {bound: found[f"{name}_bucket", ("all_reduce", bound, "4096")] for bound in BOUNDS}
    assert within == {"0.0001": 1, "0.01": 3, "+Inf": 6}
    assert found[f"{name}_sum", ("all_reduce", "4096")] == 4.5
    assert found[f"{name}_count", ("barrier", "+Inf")] == 1


def test_what_is_not_known_is_left_out() -> None:
    rank = msgspec.structs.replace(RANK, own_percent=None, share_percent=None)
    job = msgspec.structs.replace(JOB, ranks=(rank,), steps_per_s=None)
    names = {name for name, _ in metrics_of(msgspec.structs.replace(STATUS, jobs=(job,)))}
    assert names.isdisjoint({"rank_own_ratio", "rank_share_ratio", "job_steps_per_second"})
    assert "rank_ops_total" in names


def test_events_are_counted_over_all_scrapes() -> None:
    pages = iter([page("peer lost", "peer joined"), page(), page("peer lost")])
    collector = AgentCollector(lambda: STATUS, lambda: next(pages))
    assert [scraped(collector)["events_total", ("peer lost",)] for _ in range(3)] == [1, 1, 2]


def test_an_agent_that_does_not_answer_is_down_until_it_does() -> None:
    answers = False

    def status() -> Status:
        if not answers:
            raise AgentNotRunning("nobody")
        return STATUS

    collector = AgentCollector(status, page)
    assert scraped(collector) == {("up", ()): 0}
    answers = True
    assert scraped(collector)["up", ()] == 1


# --- what goes with it


def program_or_skip() -> str:
    if promtool := shutil.which("promtool"):
        return promtool
    if os.environ.get("CI"):
        pytest.fail("needs promtool, of Debian's package prometheus")
    return pytest.skip("needs promtool, of Debian's package prometheus")


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bpmesh_([a-z_]+)(?=[\[{)\s]|$|==| >| <|\\?\")", text)) - {"job_state!"}


def all_names() -> set[str]:
    return {name for name, _ in scraped(AgentCollector(lambda: STATUS, lambda: page("peer lost")))}


def test_the_page_lists_exactly_what_there_is() -> None:
    rows = table_rows(read(DOCS / "how-to" / "metrics.md"))
    assert {code_in(row[0])[0] for row in rows} == all_names()


@pytest.mark.parametrize("file", ["alerts.yml", "dashboard.json"])
def test_alerts_and_dashboard_ask_only_for_what_there_is(file: str) -> None:
    text = read(PACKAGING / file)
    if file == "dashboard.json":
        panels = json.loads(text)["panels"]
        asked = [target["expr"] for panel in panels for target in panel["targets"]]
        assert len(asked) == len(panels)
    else:
        asked = re.findall(r"expr: (.+)", text)
        assert len(asked) == text.count("alert:")
    for expression in asked:
        assert names_in(expression)
        assert names_in(expression) <= all_names(), expression


def test_each_alert_fires_when_it_must_and_only_then(tmp_path: Path) -> None:
    promtool = program_or_skip()
    histories = Path(__file__).with_name("alerts.yml")
    for file in (RULES, histories):
        shutil.copy(file, tmp_path / ("test.yml" if file is histories else file.name))
    ran = subprocess.run(
        [promtool, "test", "rules", "test.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    tested = re.findall(r"alertname: (\w+)\n\s+exp_alerts", read(histories))
    assert sorted(tested) == sorted(re.findall(r"alert: (\w+)", read(RULES)))


def test_promtool_finds_no_fault_with_the_metrics() -> None:
    promtool = program_or_skip()
    registry = CollectorRegistry()
    registry.register(AgentCollector(lambda: STATUS, lambda: page("peer lost")))
    ran = subprocess.run(
        [promtool, "check", "metrics"],
        input=generate_latest(registry),
        capture_output=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, b"")


# --- the command


@pytest.mark.parametrize("listen", ["127.0.0.1:0", ":0"])
def test_it_serves_until_ctrl_c(
    listen: str,
    tmp_path: Path,
    faults: Faults,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers: list[str] = []

    def ask_and_interrupt(
        joined: Real, thread: threading.Thread, timeout: float | None = None
    ) -> None:
        if answers:
            joined(thread, timeout)
            return
        (url,) = re.findall(r"http://\S+", capsys.readouterr().out)
        with urllib.request.urlopen(url) as response:  # noqa: S310 - the server's own address
            answers.append(response.read().decode())
        raise KeyboardInterrupt

    faults.around(threading.Thread, "join", ask_and_interrupt)
    faults.pretend(socket, "gethostname", lambda: "127.0.0.1")
    home = str(tmp_path / "home")
    assert run(["metrics", "--listen", listen, "--home", home]) == 130
    assert "pmesh_up 0.0" in answers[0]


@pytest.mark.parametrize(
    ("listen", "said"),
    [
        ("127.0.0.1:port", "ConfigError: --listen: a port must be a number"),
        ("mac..1:80", "can't be the name of a host"),
        ("192.0.2.1:0", "ConfigError: can't listen at 192.0.2.1: Cannot assign"),
    ],
)
def test_an_address_that_is_none_is_named(
    listen: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["metrics", "--listen", listen]) == 2
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    server, thread = start_http_server(0, "127.0.0.1", CollectorRegistry())
    try:
        assert run(["metrics", "--listen", f"127.0.0.1:{server.server_port}"]) == 1
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert "PortTaken: port " in capsys.readouterr().err
