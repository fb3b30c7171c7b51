"""What `pmesh plot` asks its agent."""

from typing import Annotated, TypeAlias

from msgspec import Meta

from pmesh.core.wire.session import JobText, Refused, SessionDecoder, SessionMessage


class AskCharts(SessionMessage, frozen=True, tag="ask_charts"):
    """Asks how the numbers of a job went lately; answered by Refused or JobCharts."""

    job: JobText


class JobCharts(SessionMessage, frozen=True, tag="job_charts"):
    """The numbers of a job, by name."""

    slot: Annotated[int, Meta(ge=0)]
    """Now, in the unit of the charts' slots."""
    slot_s: Annotated[float, Meta(gt=0)]
    """How long a slot is, in seconds."""
    charts: dict[str, tuple[tuple[int, ...], tuple[float, ...]]]
    """The slots in which the number was known, ascending, and its value in each."""


ChartReply: TypeAlias = Refused | JobCharts
CHART_REPLIES: SessionDecoder[ChartReply] = SessionDecoder("reply", ChartReply)
