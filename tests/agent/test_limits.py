"""The limit of open files, on systems of three kinds; only the system calls are faked."""

import errno
import os
import resource

import pytest

from pmesh.agent.limits import (
    FEW_OPEN_FILES,
    MAX_TRAINERS,
    OPEN_FILES,
    open_files_limit,
    plan_files,
    raise_open_files,
)
from pmesh.net.sessions import MAX_VISITORS


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


@pytest.mark.parametrize("limit", [8, 64, 100, 256, 1024, 4096, OPEN_FILES, 2**20])
def test_local_programs_leave_half_of_the_files_to_the_agent(limit: int) -> None:
    plan = plan_files(limit)
    assert plan.visitors + 2 * plan.trainers + plan.arenas <= limit // 2
    assert 1 <= plan.visitors <= MAX_VISITORS
    assert 1 <= plan.trainers <= MAX_TRAINERS
    assert plan.arenas >= plan.trainers or limit < 64


def test_what_a_user_can_change_about_too_few_files_is_said() -> None:
    few, many = plan_files(256), plan_files(OPEN_FILES)
    assert few.describe_trainers().startswith(
        "this agent serves 16 connections of trainers at most, of which one program gets half"
    )
    assert "as only 256 files may be open" in few.describe_trainers()
    assert "ulimit -n 1024" in few.describe_trainers()
    assert "ulimit" not in many.describe_trainers()


@pytest.mark.parametrize(("soft", "limit"), [(77, 77), (resource.RLIM_INFINITY, OPEN_FILES)])
def test_an_unlimited_number_of_files_is_planned_as_what_is_asked_for(
    soft: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", System(soft, soft).getrlimit)
    assert open_files_limit() == limit
