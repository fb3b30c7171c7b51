import re
from pathlib import Path

import pytest

from pmesh.agent.mesh.membership import HEARTBEAT_S
from pmesh.core.jobs.attempt import MAX_UNSTABLE_BYTES, MAX_UNSTABLE_OPS
from pmesh.core.links.dialing import FIRST_DELAY_S, LONGEST_DELAY_S
from pmesh.core.links.health import WIFI, WIRED
from pmesh.core.ops.cost import LONG_WAY_NS
from pmesh.core.ops.plan import (
    LARGE_CHUNK_BYTES,
    LARGE_SEGMENT_BYTES,
    SEGMENT_BYTES,
    SHORT_SEGMENT_BYTES,
)
from pmesh.core.topology.ring import EXACT_UP_TO
from pmesh.net.links.acceptor import MAX_PENDING, MAX_PENDING_PER_ADDRESS, PENDING_TIMEOUT_S
from tests.docs.pages import DOCS, flat, read, sections, table_rows

DESIGN, NETWORKS, RULES = (
    sections(read(DOCS / "explanation" / f"{page}.md")) for page in ("design", "networks", "rules")
)
SECURITY = sections(read(DOCS / "explanation" / "security.md"))
MIB = 1024 * 1024


@pytest.mark.parametrize("page", sorted((DOCS / "explanation").glob("*.md")), ids=lambda p: p.stem)
def test_each_page_begins_with_a_paragraph_that_one_can_stop_after(page: Path) -> None:
    text = re.sub(r"<!--.*?-->\s*", "", read(page), flags=re.DOTALL)
    title, paragraph, *_ = text.split("\n\n")
    sentences = re.findall(r"\.(?= |$)", flat(paragraph.replace("*", "")))

    assert title.startswith("# ")
    assert 3 <= len(sentences) <= 5, paragraph


def test_the_silences_on_the_page_are_those_that_the_agent_judges_by() -> None:
    section = NETWORKS["Failure detection"]

    assert list(table_rows(section)) == [
        ["degraded", f"{WIRED.degraded_after_s} s", f"{WIFI.degraded_after_s} s"],
        ["suspect", f"{WIRED.suspect_after_s} s", f"{WIFI.suspect_after_s} s"],
        ["gone", f"{WIRED.gone_after_s} s", f"{WIFI.gone_after_s} s"],
    ]
    assert f"each link every {HEARTBEAT_S} s" in section


def test_the_numbers_in_the_design_are_those_of_the_code() -> None:
    whole = flat(" ".join([*DESIGN.values(), *NETWORKS.values(), *RULES.values()]))

    assert f"again after {FIRST_DELAY_S} s" in whole
    assert f"up to {LONGEST_DELAY_S:g} s" in whole
    assert f"up to {EXACT_UP_TO} members" in whole
    bounds = f"in number ({MAX_UNSTABLE_OPS}) and bytes ({MAX_UNSTABLE_BYTES // MIB} MiB)"
    assert bounds in whole
    small, large = f"{SEGMENT_BYTES // 1024} KiB", f"{LARGE_SEGMENT_BYTES // MIB} MiB"
    chunks = f"chunks of {LARGE_CHUNK_BYTES // MIB} MiB and more"
    assert f"segments of at most {small}, or {large} in {chunks}" in whole
    far = f"an edge of {LONG_WAY_NS // 1_000_000} ms or more one way"
    assert f"have {SHORT_SEGMENT_BYTES // 1024} KiB where a ring has {far}" in whole


def test_the_limits_before_authentication_are_those_of_the_door() -> None:
    text = flat(SECURITY["What is protected, against whom"])

    assert f"has {PENDING_TIMEOUT_S:g} s to prove" in text
    assert f"At most {MAX_PENDING} may be pending, {MAX_PENDING_PER_ADDRESS} from one" in text
