"""A program that was started: its process, the lines that it prints, and how to wait for them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from tools.lab.commands import LabError
from tools.lab.net import LabHost

PATIENCE_S = 60.0  # for what must happen; what takes longer has hung
LOOK_EVERY_S = 0.02  # for what no line tells
SHOWN_LINES = 25
NEWS = threading.Condition()
"""Notified of each line of any program, and of its end; who holds it reads what does not change."""


class PrintedLine(NamedTuple):
    at: float
    """When it came, of the monotonic clock."""
    text: str


class LabProgram:
    """A program, and what it has printed; see `start` for one that starts here and now.

    Args:
        name: For errors and logs.
        pid: Of the program itself, in whatever host it runs. It leads a process group.
        output: Where its lines come from; their end counts as its own.
        popen: None for the child of another process, whose exit code nobody knows.
        errors: The file into which it writes what does not come by `output`.
    """

    def __init__(
        self,
        name: str,
        pid: int,
        output: IO[str],
        *,
        popen: subprocess.Popen[str] | None = None,
        errors: Path | None = None,
    ) -> None:
        self.name, self.pid = name, pid
        self.started = time.monotonic()
        self.lines: list[PrintedLine] = []
        self.ended = False
        """It has, and all that it and its children have printed has been read."""
        self._popen = popen
        self._errors = errors
        self._heard = 0
        self._reports: list[dict[str, Any]] = []
        self._decoded = 0
        self._reader = threading.Thread(target=self._read, args=(output,), daemon=True)
        self._reader.start()

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        host: LabHost | None = None,
        errors: Path | None = None,
        told: bool = False,
    ) -> Self:
        """Start it in a session of its own: a Ctrl-C is ours alone, and we then end it.

        Args:
            name: For errors and logs.
            command: As a shell would start it.
            environment: All of it.
            host: Where it runs, if not simply here.
            errors: A file for its standard error, which else is part of its lines.
            told: It reads what `tell` writes.
        """
        with contextlib.ExitStack() as stack:
            popen = subprocess.Popen(
                command if host is None else host.command(command),
                env=environment,
                stdin=subprocess.PIPE if told else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(errors.open("w")) if errors else subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        assert popen.stdout is not None  # noqa: S101 - it was started with a pipe
        return cls(name, popen.pid, popen.stdout, popen=popen, errors=errors)

    def _read(self, output: IO[str]) -> None:
        with output:
            for text in output:
                line = PrintedLine(time.monotonic(), text.rstrip("\n"))
                with NEWS:
                    if self._takes(line.text):
                        self.lines.append(line)
                    NEWS.notify_all()
        if self._popen is not None:
            self._popen.wait()
        with NEWS:
            self.ended = True
            NEWS.notify_all()

    def _takes(self, line: str) -> bool:  # noqa: ARG002 - for who keeps not all of them
        return True

    # --- what it has printed

    def printed(self, *, since: float = 0.0) -> list[str]:
        """Its lines from this time on."""
        with NEWS:
            return [line.text for line in self.lines if line.at >= since]

    @property
    def text(self) -> str:
        return "\n".join(self.printed())

    def last_line(self, start: str, *, since: float = 0.0) -> PrintedLine:
        """The last one from this time on that begins so; else one at 0.0 that is empty."""
        with NEWS:
            found = (x for x in reversed(self.lines) if x.at >= since and x.text.startswith(start))
            return next(found, PrintedLine(0.0, ""))

    def found(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        """Where it occurs in a line."""
        return [match for line in self.printed() if (match := pattern.search(line))]

    @property
    def reports(self) -> list[dict[str, Any]]:
        """Its lines that are JSON objects."""
        with NEWS:
            for line in self.lines[self._decoded :]:
                if line.text.startswith("{"):
                    with contextlib.suppress(ValueError):
                        self._reports.append(json.loads(line.text))
            self._decoded = len(self.lines)
            return [*self._reports]

    def last(self, name: str) -> Any:  # noqa: ANN401 - whatever it reports
        """What it has reported last under this name; None if it never did."""
        return next((each[name] for each in reversed(self.reports) if name in each), None)

    def hear(self, *, within_s: float = PATIENCE_S) -> str:
        """The first line that this has not returned before; raises LabError if none comes."""
        await_that(lambda: len(self.lines) > self._heard, "a line", within_s=within_s, of=[self])
        self._heard += 1
        return self.lines[self._heard - 1].text

    def follow(self) -> Iterator[str]:
        """Each line that `hear` has not returned, as it comes, until the program ends."""
        while True:
            with NEWS:
                NEWS.wait_for(lambda: self.ended or len(self.lines) > self._heard)
                if len(self.lines) <= self._heard:
                    return
                self._heard += 1
            yield self.lines[self._heard - 1].text

    @property
    def shown(self) -> str:
        """Its name, whether it runs, and the last that it has said."""
        lines = self.printed()
        if self._errors is not None:
            lines = self._errors.read_text(errors="replace").splitlines()
        state = "runs" if self.alive else f"ended with {self.code}"
        return "\n".join([f"--- {self.name} ({state})", *lines[-SHOWN_LINES:]])

    # --- its process

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs, and if nobody knows."""
        return None if self._popen is None else self._popen.poll()

    @property
    def alive(self) -> bool:
        return not self.ended if self._popen is None else self._popen.poll() is None

    def tell(self, line: str) -> None:
        """Write it to its standard input; if the program has gone, `hear` says why."""
        assert self._popen is not None and self._popen.stdin is not None  # noqa: S101, PT018
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(line + "\n")
            self._popen.stdin.flush()

    def send_signal(self, number: signal.Signals) -> None:
        """A signal to the program alone, unless it has ended."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def join(self, *, within_s: float = PATIENCE_S) -> int | None:
        """Its exit code, once it has ended and all of its lines have been read."""
        try:
            await_that(lambda: self.ended, "its end", within_s=within_s)
        except LabError as e:
            raise LabError(f"{e}\n{self.shown}") from None
        return self.code

    def end(self, *, first: signal.Signals = signal.SIGKILL, within_s: float = 5.0) -> None:
        """End it and what it has started, whatever state that is in.

        Args:
            first: A signal by which it may end itself.
            within_s: How long it has for that.
        """
        self.send_signal(first)
        with contextlib.suppress(LabError):
            await_that(lambda: not self.alive, "the end", within_s=within_s)
        if self.alive or self._popen is not None:
            # All of them may have ended; macOS says EPERM where none but zombies are left.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        if self._popen is not None:
            self._popen.wait()
            if self._popen.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._popen.stdin.close()
        self._reader.join(within_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def runs(program: LabProgram | None) -> bool:
    return program is not None and not program.ended


def await_that(
    holds: Callable[[], object],
    what: str,
    *,
    within_s: float = PATIENCE_S,
    of: Iterable[LabProgram] = (),
) -> float:
    """Wait until this holds, and return how long that took.

    It is looked at after each line of any program, of which none comes meanwhile.

    Args:
        holds: Whether it does.
        what: For the error.
        within_s: How long to wait.
        of: Programs without any of which there is no use to wait; the error shows their last lines.

    Raises:
        LabError: It does not hold in time, or one of these programs has ended before.
    """
    began, of = time.monotonic(), list(of)
    with NEWS:
        while not holds():
            left_s = began + within_s - time.monotonic()
            ended = [program.name for program in of if program.ended]
            if left_s <= 0 or ended:
                when = f"before {ended[0]} ended" if ended else f"within {within_s:g} s"
                shown = [program.shown for program in of]
                raise LabError("\n".join([f"{what} did not come {when}", *shown]))
            NEWS.wait(min(left_s, LOOK_EVERY_S))
    return time.monotonic() - began


@contextlib.contextmanager
def keep_busy(count: int) -> Iterator[None]:
    """So many processes that compute without a rest, from `with` to its end."""
    with contextlib.ExitStack() as stack:
        for number in range(count):
            command = [sys.executable, "-c", "while True: pass"]
            stack.enter_context(LabProgram.start(f"busy {number}", command, environment=os.environ))
        yield
