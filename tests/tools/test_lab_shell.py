"""The lab's command line, as a developer types it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.worlds.system import be_on
from tools.lab import net as netlab
from tools.lab.net import NetLab, labs

NETLAB = str(Path(netlab.__file__))


def run(*arguments: str, lab: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "NETLAB"}
    return subprocess.run(
        [sys.executable, NETLAB, *arguments],
        env=environment | ({} if lab is None else {"NETLAB": lab}),
        capture_output=True,
        text=True,
        check=False,
    )


@contextmanager
def shell(*, script: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, NETLAB, "shell", "-n", "2"],
        env=os.environ | {"SHELL": "/bin/sh"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(script)
        process.stdin.flush()
        yield process


def test_whoever_may_not_make_labs_is_told_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be_on(monkeypatch, "darwin")

    assert netlab.main() == 1
    assert capsys.readouterr().err == "netlab: network namespaces need Linux\n"


@pytest.mark.netns
def test_the_shell_commands_its_lab_and_the_lab_ends_with_it() -> None:
    script = (
        "echo lab $NETLAB; netlab run 2 -- ip -br -4 addr show eth0; netlab cut 1 2 && echo cut\n"
        "netlab run 1 -- sh -c 'exit 7'; echo code $?\nexit 3\n"
    )
    with shell(script=script) as process:
        output, _ = process.communicate(timeout=60)

    name = next(line.split()[1] for line in output.splitlines() if line.startswith("lab "))
    assert "10.77.0.2/24" in output
    assert "cut\ncode 7\n" in output
    assert process.returncode == 3
    assert name not in labs()


@pytest.mark.netns
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_lab_too(number: signal.Signals) -> None:
    with shell(script="echo lab $NETLAB; exec sleep 1000\n") as process:
        assert process.stdout is not None
        name = next(line.split()[1] for line in process.stdout if line.startswith("lab "))
        process.send_signal(number)
        process.wait(timeout=30)

    assert name not in labs()


@pytest.mark.netns
def test_commands_from_another_shell_find_the_lab_by_its_name() -> None:
    with NetLab(2) as lab:
        listed = run("list").stdout
        assert lab.name in listed
        assert lab.hosts[1].ipv6 in listed

        assert run("shape", "1", "100", lab=lab.name).returncode == 0
        qdisc = lab.hosts[0].run(["tc", "qdisc", "show", "dev", "eth0"])
        assert "tbf" in qdisc
        assert "100Mbit" in qdisc
