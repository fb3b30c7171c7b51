"""A real Prometheus asks three agents by `pmesh metrics`, and evaluates each of our rules."""

import json
import os
import shutil
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tools.lab.mesh import LabMesh
from tools.lab.program import LabProgram, await_that

pytestmark = pytest.mark.slow

CONFIGURATION = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: pmesh
    static_configs: [{{targets: {targets}}}]
"""


class Prometheus:
    """One that listens here, and asks these targets each second."""

    def __init__(self, folder: Path, targets: list[str], address: str) -> None:
        program = shutil.which("prometheus")
        if not program:
            if os.environ.get("CI"):
                pytest.fail("needs Debian's package prometheus")
            pytest.skip("needs Debian's package prometheus")
        rules = ROOT / "packaging" / "prometheus" / "alerts.yml"
        configuration = folder / "prometheus.yml"
        configuration.write_text(CONFIGURATION.format(rules=rules, targets=targets))
        self._address = address
        options = (
            f"--config.file={configuration}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self._address}",
        )
        self.program = LabProgram.start("prometheus", [program, *options], environment={})

    def ask(self, path: str, **parameters: str) -> dict[str, Any]:
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url) as answer:
                found: dict[str, Any] = json.load(answer)["data"]
                return found
        except OSError:  # it does not listen yet
            return {}

    def values(self, query: str) -> list[float]:
        found = self.ask("query", query=query).get("result", ())
        return [float(each["value"][1]) for each in found]

    def firing(self) -> set[str]:
        alerts = self.ask("alerts").get("alerts", ())
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@pytest.fixture
def mesh() -> Iterator[LabMesh]:
    with LabMesh(3) as made:
        made.start_agents()
        made.await_view()
        yield made


@pytest.fixture
def prometheus(mesh: LabMesh, tmp_path: Path) -> Iterator[Prometheus]:
    targets: list[str] = []
    for node in mesh.nodes:
        exporter = mesh.start_command(node, "metrics", "--listen", "127.0.0.1:0")
        await_that(exporter.printed, "its address", of=[exporter])
        targets.append(exporter.printed()[0].rpartition("//")[2].removesuffix("/metrics"))
    # It takes no port 0. It may share one that is bound, and nobody who asks for any gets that.
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        found = Prometheus(tmp_path, targets, f"127.0.0.1:{held.getsockname()[1]}")
        try:
            yield found
        finally:
            found.program.end()


@pytest.mark.timeout(120)
def test_three_agents_are_scraped_and_a_lost_one_is_an_alert(
    mesh: LabMesh, prometheus: Prometheus
) -> None:
    programs = [prometheus.program]
    await_that(
        lambda: prometheus.values("pmesh_members") == [3, 3, 3], "three answers", of=programs
    )

    def rules() -> list[dict[str, Any]]:
        groups = prometheus.ask("rules").get("groups", ())
        return [rule for group in groups for rule in group["rules"]]

    await_that(
        lambda: rules() and all(rule["health"] == "ok" for rule in rules()),
        "each rule evaluated",
        of=programs,
    )
    assert prometheus.firing() == set()
    mesh.nodes[2].kill("agent")
    await_that(lambda: "PmeshMachineLost" in prometheus.firing(), "the alert", of=programs)
    await_that(
        lambda: sorted(prometheus.values("pmesh_up")) == [0, 1, 1], "it is down", of=programs
    )
