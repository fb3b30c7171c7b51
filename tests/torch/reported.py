"""What the agent of a rank shows of what its job has reported."""

from pmesh.agent.schema import decode_status
from pmesh.client.control import ask_status
from pmesh.core.jobs.reports import NotFinite
from pmesh.home_paths import home_directory


def reported(job: str) -> list[dict[str, float | NotFinite]]:
    """By rank; after an op that each rank has begun with it, all is there."""
    jobs = decode_status(ask_status(home_directory(None))).jobs
    return [rank.reports for each in jobs if each.name == job for rank in each.ranks]
