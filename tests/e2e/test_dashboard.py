"""`pmesh dashboard` in a real Chromium: three hosts, a rank that is killed, an agent that goes."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.e2e.harness import Fleet
from tools.lab.chromium import Chromium
from tools.lab.net import NetLab

pytestmark = [pytest.mark.netns, pytest.mark.slow]

EVIL = "<img src=x onerror=alert(1)>"
TRAINER = """
import time
import numpy as np
import pmesh

with pmesh.connect(job="digits", wait_for=3) as mesh:
    values = np.ones(1000, np.float32)
    while True:
        values = mesh.sync(values)
        mesh.all_reduce(values)
        mesh.report(loss=0.25 * (1 + mesh.rank))
        time.sleep(0.02)  # it computes
"""
RANKS = "document.querySelectorAll('.rank').length"
GONE = "document.getElementById('gone')"


def test_the_page_shows_a_lost_rank_and_an_agent_that_goes_and_comes(
    fleet: Fleet, make_lab: Callable[..., NetLab]
) -> None:
    if not Chromium.is_here():
        if os.environ.get("CI"):
            pytest.fail("needs Debian's package chromium")
        pytest.skip("needs Debian's package chromium")
    hosts = make_lab(3).hosts
    agents = [
        fleet.start_agent(name, host=host)
        for name, host in zip(("mac-1", "mac-2", EVIL), hosts, strict=True)
    ]
    server = fleet.start_command("dashboard", home=agents[0].home, host=hosts[0])
    (url,) = server.await_line(r"http://\S+").group().split()
    with Chromium(hosts[0], width=360, height=740) as browser:
        browser.open(url)
        fleet.await_view(*agents)
        trainers = [fleet.start_trainer(agent, TRAINER) for agent in agents]
        charts = "[...document.querySelectorAll('.charts h3')].map((node) => node.textContent)"
        browser.await_that(f"{RANKS} === 3 && {charts}.includes('loss0.5')")  # the mean
        assert browser.evaluate("document.documentElement.scrollWidth") == 360
        names = "[...document.querySelectorAll('#machines b')].map((node) => node.innerText)"
        assert any(EVIL in name for name in browser.evaluate(names))

        killed_at = time.monotonic()
        trainers[2].send_signal(signal.SIGKILL)
        lost = "document.getElementById('events').textContent.includes('rank lost')"
        browser.await_that(f"{RANKS} === 2 && {lost}")
        shown_s = time.monotonic() - killed_at
        print(f"the page shows the lost rank after {shown_s:.1f} s")  # noqa: T201 - pytest captures it
        assert EVIL in browser.evaluate("document.getElementById('events').textContent")

        agents[0].process.send_signal(signal.SIGKILL)
        browser.await_that(f"!{GONE}.hidden && {GONE}.textContent.includes('agent')")
        fleet.start_agent("mac-1", host=hosts[0])
        browser.await_that(f"{GONE}.hidden")
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert browser.complaints == []
