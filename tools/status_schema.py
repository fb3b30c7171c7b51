"""Write the schemas in docs/reference anew, after a change in pmesh/agent/{status,events}.py."""

from pathlib import Path

from pmesh.agent.status.events import events_schema
from pmesh.agent.status.schema import status_schema

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"

if __name__ == "__main__":
    for name, schema in (("status", status_schema()), ("events", events_schema())):
        path = REFERENCE / f"{name}.schema.json"
        path.write_bytes(schema)
        print(f"wrote {path}")
