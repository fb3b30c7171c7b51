"""`pmesh version`: what two machines compare that can't link, and how this one works."""

from importlib.metadata import version as installed_version

from pmesh import native
from pmesh.core.wire import aead
from pmesh.core.wire.link import PROTOCOL_VERSION


def version_text() -> str:
    what = f"pmesh {installed_version('pmesh')}, protocol {PROTOCOL_VERSION}"
    slow = f"; it {aead.describe(aead.WHY_SLOW)}" if aead.WHY_SLOW else ""
    return f"{what}, {native.describe(native.why_missing())}{slow}"
