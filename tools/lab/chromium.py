"""A headless Chromium, told what to do over a pipe, for the page of `pmesh dashboard`.

The protocol is Chromium's own (DevTools), as JSON objects with a NUL after each: commands to its
descriptor 3, answers from its descriptor 4. No part of it is sent over a network.
"""

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any, Final, Self

from tools.lab.commands import LabError
from tools.lab.net import LabHost
from tools.lab.program import PATIENCE_S

# A shell gives it the pipes at 3 and 4, which are its standard input and output here.
_WITH_PIPES: Final = 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null'
_OPTIONS: Final = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # it does not start as root with one
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
)


class Chromium:
    """One page in a Chromium of its own, from `with` to its end.

    Args:
        host: Where it runs, if not simply here.
        width: Of the window, in CSS pixels.
        height: Likewise.
        scale: Pixels of a screenshot for each CSS pixel.
        dark: Whether the user prefers dark pages.
    """

    def __init__(
        self,
        host: LabHost | None = None,
        *,
        width: int = 1280,
        height: int = 800,
        scale: float = 1.0,
        dark: bool = False,
    ) -> None:
        self._host = host
        self._size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self._dark = dark
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-")
        self.complaints: list[str] = []
        """What the page or its policy has complained of, as a developer's console shows it."""

    @staticmethod
    def is_here() -> bool:
        return shutil.which("chromium") is not None

    def __enter__(self) -> Self:
        command = ["chromium", *_OPTIONS, f"--user-data-dir={self._profile.name}", "about:blank"]
        words = ["sh", "-c", _WITH_PIPES, "sh", *command]
        self._process = subprocess.Popen(
            self._host.command(words) if self._host else words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            target = self._tell("Target.createTarget", url="about:blank")["targetId"]
            found = self._tell("Target.attachToTarget", targetId=target, flatten=True)
            self._session = {"sessionId": found["sessionId"]}
            for part in ("Page", "Runtime", "Log"):
                self._tell(f"{part}.enable")
            self.resize(**self._size)
            scheme = "dark" if self._dark else "light"
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            self._tell("Emulation.setEmulatedMedia", features=features)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in self._pipes():
            stream.close()
        self._profile.cleanup()

    def open(self, url: str) -> None:
        self._tell("Page.navigate", url=url)

    def resize(self, **size: Any) -> None:  # noqa: ANN401 - width, height, deviceScaleFactor, mobile
        self._tell("Emulation.setDeviceMetricsOverride", **(self._size | size))

    def evaluate(self, source: str) -> Any:  # noqa: ANN401 - JSON
        """Return what an expression of JavaScript is, or what its promise comes to."""
        answer = self._tell(
            "Runtime.evaluate", expression=source, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise LabError(f"{source}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def await_that(self, condition: str) -> None:
        """Wait until an expression of JavaScript is true; it is looked at with each change.

        Raises LabError if it never is.
        """
        self.evaluate(
            "new Promise((done, fail) => {"
            f" setTimeout(() => fail(new Error('it never came')), {1000 * PATIENCE_S});"
            f" const look = () => {{ if ({condition}) {{ watcher.disconnect(); done(); }} }};"
            " const watcher = new MutationObserver(look);"
            " watcher.observe(document, {subtree: true, childList: true, attributes: true,"
            " characterData: true});"
            " look(); })"
        )

    def screenshot(self, file: Path) -> None:
        """Write the whole page as PNG."""
        answer = self._tell("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(answer["data"]))

    def _tell(self, method: str, **parameters: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
        number = next(self._numbers)
        told = {"id": number, "method": method, "params": parameters, **self._session}
        writer, _ = self._pipes()
        writer.write(json.dumps(told).encode() + b"\0")
        writer.flush()
        while (message := self._receive()).get("id") != number:
            self._note(message)
        if "error" in message:
            raise LabError(f"{method}: {message['error']}")
        result: dict[str, Any] = message["result"]
        return result

    def _note(self, message: dict[str, Any]) -> None:
        told = message.get("params", {})
        if message.get("method") == "Page.javascriptDialogOpening":  # nothing goes on behind one
            raise LabError(f"a script has opened a dialog: {told}")
        of_network = (
            told.get("entry", {}).get("source") == "network"
        )  # as of a page that is not there
        if (
            message.get("method") in {"Runtime.exceptionThrown", "Log.entryAdded"}
            and not of_network
        ):
            self.complaints.append(json.dumps(told))

    def _receive(self) -> dict[str, Any]:
        _, reader = self._pipes()
        data = bytearray()
        while (byte := reader.read(1)) != b"\0":
            if not byte:
                raise LabError("chromium has ended")
            data += byte
        message: dict[str, Any] = json.loads(data)
        return message

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdin is not None  # noqa: S101 - it was started with pipes
        assert self._process.stdout is not None  # noqa: S101 - likewise
        return self._process.stdin, self._process.stdout
