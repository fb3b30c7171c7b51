"""The lab of slow networks, by real packets, and what the bench makes of its ranks' lines."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.networks.lab import PROFILES, Profile, SlowLab
from tools.networks.results import Line, Outcome, verdicts_of

ROOT = Path(__file__).parents[2]
PING = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), timeout=10) as connection:
    for _ in range(5):
        began = time.monotonic()
        connection.sendall(b"x")
        connection.recv(1)
        print(time.monotonic() - began)
"""
ECHO = """
import socket
with socket.create_server(("", 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(1):
            connection.sendall(data)
"""


def steps(*took_s: float, ranks: int = 2) -> list[Line]:
    """The lines of a rank whose steps follow each other from 10.0 on."""
    lines, at = [Line(what="joined", at=9.0)], 10.0
    for seconds in took_s:
        at += seconds
        lines.append(Line(what="step", at=at, took_s=seconds, ranks=ranks))
    return lines


def test_an_outcome_counts_the_slowest_rank_and_the_step_that_is_under_way() -> None:
    ranks = [steps(1.0, 1.0, 1.0), [*steps(1.0, 2.0), Line(what="error", at=13.0)]]
    outcome = Outcome.of(ranks, began=10.0, ended=18.0, views=0)
    assert (outcome.steps, outcome.median_s, outcome.worst_s) == (2, 1.0, 5.0)
    assert (outcome.errors, outcome.alone) == (1, 0)


def test_steps_without_all_ranks_and_views_miss_their_bars() -> None:
    good = Outcome.of([steps(1.0), steps(1.0)], began=10.0, ended=11.0, views=0)
    alone = Outcome.of([steps(1.0, ranks=1), steps(1.0)], began=10.0, ended=11.0, views=2)
    assert {v.outcome for v in verdicts_of(good, good, short=False)} == {"met"}
    missed = {v.what for v in verdicts_of(alone, good, short=False) if v.outcome == "MISSED"}
    assert missed == {"views", "steps without all ranks"}


@pytest.mark.netns
def test_the_switch_delays_and_a_cut_holds_what_is_sent() -> None:
    with SlowLab(2, Profile(delay_ms=20)) as lab:
        one, two = lab.hosts
        with two.popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE) as echo:
            assert echo.stdout is not None
            assert echo.stdout.readline() == "ready\n"
            trips = one.run([sys.executable, "-c", PING, two.ipv4]).split()
        assert len(trips) == 5
        assert all(float(trip) >= 0.04 for trip in trips)
        lab.cut(one, two)
        with pytest.raises(subprocess.CalledProcessError):
            one.run([sys.executable, "-c", PING.replace("timeout=10", "timeout=0.5"), two.ipv4])


@pytest.mark.netns
@pytest.mark.e2e
def test_a_mesh_holds_together_on_crowded_wifi() -> None:
    pytest.importorskip("torch")  # gloo has its turn too
    assert "crowded" in PROFILES
    command = [sys.executable, "-m", "tools.networks", "run", "--short"]
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, f"{time.monotonic() - began:.0f} s: {done.stdout}{done.stderr}"
