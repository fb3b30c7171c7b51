"""The status schema is documented, versioned and current."""

import json
from pathlib import Path

import pytest

from pmesh.agent.status.schema import SCHEMA_VERSION, decode_status, encode_status, status_schema
from pmesh.errors import UsageError
from tests.worlds.fake_status_agent import SNAPSHOT

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "status.schema.json"


def test_the_schema_in_the_reference_is_current() -> None:
    assert REFERENCE.read_bytes() == status_schema(), "run: python tools/status_schema.py"


def test_a_picture_survives_its_json() -> None:
    assert decode_status(encode_status(SNAPSHOT)) == SNAPSHOT


def test_the_json_holds_what_the_issue_promises() -> None:
    picture = json.loads(encode_status(SNAPSHOT))
    assert picture["schema"] == SCHEMA_VERSION
    assert {"node", "view", "peers", "jobs", "traffic", "loop_lag_ms"} <= picture.keys()
    assert {"epoch", "leader", "members"} <= picture["view"].keys()
    members = picture["view"]["members"]
    assert all(
        {"id", "name", "rank", "health", "rtt_ms", "addresses"} <= member.keys()
        for member in members
    )
    assert [member["rank"] for member in members] == [0, 1, 2]


def test_a_field_of_a_later_pmesh_is_ignored() -> None:
    later = json.loads(encode_status(SNAPSHOT)) | {"news": 1}
    assert decode_status(json.dumps(later).encode()) == SNAPSHOT


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"schema": 1}'])
def test_another_schema_says_what_to_do(data: bytes) -> None:
    with pytest.raises(UsageError, match="restart the agent"):
        decode_status(data)
