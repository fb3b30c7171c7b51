"""What a test pretends of the system that it runs on, each in one place."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from pmesh import native


def be_on(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    """The system has this name, as in `sys.platform`."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(psutil, "MACOS", platform == "darwin")


def be_user(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    """The process is of this user; 0 is root."""
    for name in ("getuid", "geteuid"):
        monkeypatch.setattr(os, name, lambda: uid)


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The standard input brings this text, and ends."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def be_called(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """The program was started by these words."""
    monkeypatch.setattr(sys, "argv", [*words])


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


def be_a_terminal(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """These streams of `sys` say that they are a terminal's."""
    for name in names:
        monkeypatch.setattr(f"sys.{name}.isatty", lambda: True, raising=False)


@contextmanager
def forked() -> Iterator[None]:
    """This is a child of the process that all has been made in."""
    own = os.getpid()
    with pytest.MonkeyPatch.context() as child:
        child.setattr(os, "getpid", lambda: own + 1)
        yield


@contextmanager
def without_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is compiled."""
    monkeypatch.setenv("PMESH_NATIVE", "0")
    native.forget()
    yield
    native.forget()


def have_library_at(monkeypatch: pytest.MonkeyPatch, path: os.PathLike[str]) -> None:
    """The file of the native library is this one, whether or not there is one."""
    monkeypatch.delenv("PMESH_NATIVE", raising=False)
    monkeypatch.setattr(native, "PATH", path)
