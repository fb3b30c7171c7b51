"""`pmesh dashboard` in use, and used wrong: each error is one sentence."""

import re
import socket
import urllib.request

import pytest

from pmesh.cli.app import run
from pmesh.cli.dashboard.board import Board
from tests.cli.dashboard.boards import Script, serving
from tests.worlds.faults import Faults


def test_it_serves_until_ctrl_c_whether_or_not_an_agent_runs(
    tmp_path: object, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: list[bytes] = []

    def look_and_interrupt(board: Board) -> None:
        board.refresh()
        (url,) = re.findall(r"http://\S+", capsys.readouterr().out)
        with urllib.request.urlopen(f"{url}updates") as response:  # noqa: S310 - its own address
            answers.append(response.readline())
        board.refresh()  # the stream ends when it meets a browser that has gone
        board.refresh()
        raise KeyboardInterrupt

    faults.instead(Board, "watch", look_and_interrupt)
    assert run(["dashboard", "--listen", "127.0.0.1:0", "--home", f"{tmp_path}/home"]) == 130
    assert b"no agent listens at" in answers[0]


def test_the_link_has_the_token_and_each_start_another_one(
    faults: Faults, capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    faults.fail(Board, "watch", KeyboardInterrupt())
    for _ in range(2):
        assert run(["dashboard", "--listen", ":0", "--token", "--home", f"{tmp_path}/home"]) == 130
    shown = capsys.readouterr()
    tokens = re.findall(rf"http://{re.escape(socket.gethostname())}:\d+/\?token=(\S+)", shown.out)
    assert len(set(tokens)) == 2
    assert all(len(token) >= 22 for token in tokens)  # 128 bits
    assert shown.err == ""


@pytest.mark.parametrize(
    ("listen", "said"),
    [
        ("127.0.0.1:port", "ConfigError: --listen: a port must be a number from 0 to 65535"),
        ("127..0.0.1:0", "ConfigError: --listen: '127..0.0.1' can't be the name of a host"),
        ("192.0.2.1:0", "ConfigError: others could read the page at 192.0.2.1:0; add --token"),
        (":9478", "ConfigError: others could read the page at :9478; add --token, and it opens"),
        ("[::]:0", "ConfigError: others could read the page at [::]:0; add --token"),
        ("nobody.invalid:0", "ConfigError: can't listen at nobody.invalid: "),
    ],
)
def test_an_address_that_is_wrong_or_open_to_others_is_refused(
    listen: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["dashboard", "--listen", listen]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(said)
    assert shown.count("\n") == 1


def test_an_address_of_another_machine_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dashboard", "--listen", "192.0.2.1:0", "--token"]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: can't listen at 192.0.2.1: ")


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Script().board) as server:
        assert run(["dashboard", "--listen", f"127.0.0.1:{server.port}"]) == 1
        taken = f"PortTaken: port {server.port} is taken: choose another one with --listen\n"
    assert capsys.readouterr().err == taken
