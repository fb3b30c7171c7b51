"""The limit of open files, on systems of three kinds; only the system calls are faked."""

import errno
import os
import resource

import pytest

from pmesh.agent.limits import FEW_OPEN_FILES, OPEN_FILES, raise_open_files


class System:
    """A system's limit of open files, and the most that it grants (None: as the hard limit)."""

    def __init__(self, soft: int, hard: int, *, fails: bool = False) -> None:
        self.limits = (soft, hard)
        self.fails = fails

    def getrlimit(self, which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_NOFILE
        return self.limits

    def setrlimit(self, which: int, limits: tuple[int, int]) -> None:
        assert which == resource.RLIMIT_NOFILE
        if self.fails:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        self.limits = limits


def start_on(system: System, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr(resource, "getrlimit", system.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", system.setrlimit)
    return raise_open_files()


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (256, resource.RLIM_INFINITY, OPEN_FILES),  # macOS: no more than OPEN_MAX is granted
        (1024, 524_288, OPEN_FILES),  # Linux under systemd
        (1024, 4096, 4096),  # Linux elsewhere
        (20_000, 20_000, 20_000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_soft_limit_is_raised(
    soft: int, hard: int, raised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = System(soft, hard)
    assert start_on(system, monkeypatch) is None
    assert system.limits == (raised, hard)


@pytest.mark.parametrize(
    ("system", "words"),
    [
        (System(256, 512), "only 512 files may be open at once (the system allows no more)"),
        (System(512, 512), "only 512 files may be open at once (the system allows no more)"),
        (System(256, 4096, fails=True), "only 256 files may be open at once ([Errno 1]"),
    ],
)
def test_too_few_files_are_said(
    system: System, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaint = start_on(system, monkeypatch)
    assert complaint is not None
    assert complaint.startswith(words)
    assert f"ulimit -n {FEW_OPEN_FILES}" in complaint


def test_a_refusal_above_what_is_needed_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_on(System(2048, 4096, fails=True), monkeypatch) is None
