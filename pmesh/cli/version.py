"""`pmesh version`: what two machines compare that can't link, and how this one works."""

from pmesh import native
from pmesh.core.wire import aead
from pmesh.core.wire.link import PROTOCOL_VERSION
from pmesh.installed import installed_version


def version_text() -> str:
    what = f"pmesh {installed_version()}, protocol {PROTOCOL_VERSION}"
    slow = f"; it {aead.describe(aead.WHY_SLOW)}" if aead.WHY_SLOW else ""
    return f"{what}, {native.describe(native.why_missing())}{slow}"
