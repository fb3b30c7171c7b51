"""`pmesh man`: all that `--help` says, in the form that `man` reads."""

import shutil
import subprocess

import pytest
from cyclopts import App

from pmesh.cli.app import app, run
from pmesh.cli.manual import manual_page


def test_it_has_each_command_in_the_order_of_use_and_each_option_with_its_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["man"]) == 0
    page = capsys.readouterr().out
    places = [page.index(f".SS pmesh {name}") for name in ("key new", "up", "status", "version")]
    assert places == sorted(places)
    assert ".B \\-\\-mdns, \\-\\-no\\-mdns\nLook for other agents by mDNS" in page
    assert "Args:" not in page


def test_no_word_of_ours_is_an_instruction_of_roff() -> None:
    words = App(name="words")

    @words.command
    def odd() -> None:
        r"""Look into .hidden files, or
        .so /etc/passwd, or \\f.
        'tis it.
        """

    page = manual_page(words)
    assert "\n\\&.so /etc/passwd, or \\e\\ef.\n\\&'tis it.\n" in page


def test_man_finds_no_fault_with_it() -> None:
    if not (groff := shutil.which("groff")):
        pytest.skip("needs groff")
    ran = subprocess.run(
        [groff, "-man", "-k", "-Tutf8", "-P-cbou", "-ww", "-rLL=100n"],
        input=manual_page(app),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr == ""
    assert "--not-interface" in ran.stdout
