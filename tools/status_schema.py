"""Write docs/reference/status.schema.json anew, after a change in pmesh/agent/status.py."""

from pathlib import Path

from pmesh.agent.status import status_schema

PATH = Path(__file__).parents[1] / "docs" / "reference" / "status.schema.json"

if __name__ == "__main__":
    PATH.write_bytes(status_schema())
    print(f"wrote {PATH}")
