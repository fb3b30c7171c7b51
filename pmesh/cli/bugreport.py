"""`pmesh bugreport`: one file with all that is needed to find a fault, and no secret.

It is text: whoever sends it can read it first.
"""

import base64
import contextlib
import datetime as dt
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Final

import psutil

from pmesh.agent.config import CONFIG_NAME
from pmesh.agent.home import load_mesh_key, reason
from pmesh.agent.mesh.keyring import all_keys
from pmesh.agent.schema import decode_status
from pmesh.cli.doctor.command import show
from pmesh.cli.doctor.looks import Looks
from pmesh.cli.doctor.rules.findings import diagnose
from pmesh.cli.event_reader import Reader
from pmesh.cli.events import event_line
from pmesh.cli.status_all import render_all
from pmesh.cli.version import version_text
from pmesh.client.control import ask_status
from pmesh.core.identity.keys import mesh_key_text
from pmesh.errors import PmeshError, UsageError
from pmesh.home_paths import LOG_NAME, NODE_KEY_NAME, home_directory
from pmesh.installed import DISTRIBUTION
from pmesh.terminal.lines import say
from pmesh.terminal.rows import Output
from pmesh.texts import printable

LOG_BYTES: Final = 256 << 10  # of the end of the log
WIDTH: Final = 120
KEY_VARIABLE: Final = "PMESH_KEY"
HIDDEN: Final = "(a key was here)"
_LIKE_A_KEY: Final = re.compile(r"pmesh(?:-?[2-7a-z]){56,}", re.ASCII | re.IGNORECASE)
_REQUIREMENT: Final = re.compile(r"^[\w.-]+", re.MULTILINE)  # its name
_OF_INTEREST: Final = ("pmesh", "transformers", "accelerate", "lightning", "mlx-lm")


def write_report(home: Path | None, to: Path | None) -> int:
    """Write the file, and say where it is and what it has. Raises UsageError if it can't be."""
    directory = home_directory(home)
    now = dt.datetime.now(dt.UTC)
    path = to or Path(f"pmesh-bugreport-{now:%Y%m%d-%H%M%S}.txt")
    text = without_secrets(report(directory), secrets_of(directory))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise UsageError(f"can't write {path}: {reason(e)}; choose another file with --to") from e
    say(
        f"{path}, {len(text) / 1000:.0f} kB of text: versions, settings, what 'pmesh doctor'"
        " finds, status, events and the end of the log of this machine.",
        "Keys are left out. Names, addresses and paths are in it: read it before you send it.",
    )
    return 0


def report(home: Path) -> str:
    """All sections; one that can't be had says why."""
    sections: dict[str, Callable[[], Iterator[str]]] = {
        "version": lambda: iter([version_text()]),
        "machine": _machine,
        "packages": _packages,
        "settings": lambda: _settings(home),
        "doctor": lambda: _doctor(home),
        "status": lambda: _status(home),
        "events": lambda: _events(home),
        "log": lambda: _log(home),
    }
    lines = list[str]()
    for name, section in sections.items():
        lines += ["", f"===== {name}", ""]
        try:
            lines += section()
        except Exception as e:  # noqa: BLE001 - a fault of ours, too, is what it is there for
            lines.append(f"not there: {type(e).__name__}: {e}")
    return "\n".join(map(printable, lines)) + "\n"


def _machine() -> Iterator[str]:
    yield f"{platform.platform()}, {platform.machine()}, Python {platform.python_version()}"
    memory = psutil.virtual_memory().total
    yield f"{psutil.cpu_count()} cores, {memory / 1e9:.0f} GB, {sys.executable}"
    addresses = psutil.net_if_addrs()
    for name, stats in sorted(psutil.net_if_stats().items()):
        found = " ".join(a.address for a in addresses.get(name, ()) if a.family != psutil.AF_LINK)
        yield (
            f"{name}: {'up' if stats.isup else 'down'}, {stats.speed} Mbit/s, MTU {stats.mtu}"
            f" {found}"
        )


def _packages() -> Iterator[str]:
    ours: list[str] = _REQUIREMENT.findall("\n".join(requires(DISTRIBUTION) or ()))
    for name in sorted({DISTRIBUTION, *_OF_INTEREST, *ours}):
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} is not installed"


def _settings(home: Path) -> Iterator[str]:
    yield f"home: {home}"
    for name, value in sorted(os.environ.items()):
        if name.startswith("PMESH_"):
            yield f"{name}={HIDDEN if name == KEY_VARIABLE else value}"
    yield from (home / CONFIG_NAME).read_text(errors="replace").splitlines()


def _doctor(home: Path) -> Iterator[str]:
    console = Output(width=WIDTH)
    with console.capture() as captured:
        show(diagnose(Looks(home, ()).checks()), console)
    yield from captured.get().splitlines()


def _status(home: Path) -> Iterator[str]:
    console = Output(width=WIDTH)
    with console.capture() as captured:
        console.print(render_all(decode_status(ask_status(home)), width=WIDTH))
    yield from captured.get().splitlines()


def _events(home: Path) -> Iterator[str]:
    yield from (event_line(event).plain for event in Reader(home).read().events)


def _log(home: Path) -> Iterator[str]:
    with (home / LOG_NAME).open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_BYTES))
        yield from log.read().decode(errors="replace").splitlines()


def secrets_of(home: Path) -> list[str]:
    """All ways in which this machine's keys could be written."""
    texts, keys = [os.environ.get(KEY_VARIABLE, "")], list[bytes]()
    with contextlib.suppress(PmeshError, OSError):  # what can't be read is in no other text either
        mesh_key = load_mesh_key(home)
        for each in (*([] if mesh_key is None else [mesh_key]), *all_keys(home)):
            texts.append(mesh_key_text(each))
            keys.append(each)
        keys.append((home / NODE_KEY_NAME).read_bytes())
    for key in keys:
        texts += [key.hex(), base64.b64encode(key).decode(), repr(key)[2:-1]]
    return [text for text in texts if text]


def without_secrets(text: str, secrets: list[str]) -> str:
    """Leave these texts out, and whatever has the form of a mesh key."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _LIKE_A_KEY.sub(HIDDEN, text)
