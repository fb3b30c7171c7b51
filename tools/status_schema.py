"""Write the schemas in docs/reference anew, after a change in pmesh/agent/schema.py."""

from pathlib import Path

from pmesh.agent.events import EventPage
from pmesh.agent.schema import Status, json_schema

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"

if __name__ == "__main__":
    for name, schema in (("status", json_schema(Status)), ("events", json_schema(EventPage))):
        path = REFERENCE / f"{name}.schema.json"
        path.write_bytes(schema)
        print(f"wrote {path}")
