"""Keeps an hour of numbers of each job of the view, and answers `pmesh plot`."""

from typing import Never

import trio

from pmesh.agent.features import Feature, Kernel
from pmesh.charts.rules.history import SLOT_S, ChartHistory
from pmesh.charts.rules.readings import readings_of_job
from pmesh.charts.wire import AskCharts, JobCharts
from pmesh.errors import UsageError
from pmesh.net.sessions.sessions import Session


class Charts(Feature[Never, AskCharts]):
    """The numbers of jobs, whether they have ranks here or not."""

    openings = (AskCharts,)

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._history = ChartHistory()
        self._slot = -1

    def poll(self) -> None:
        """Note the numbers once in each slot."""
        jobs, now = self._kernel.jobs, trio.current_time()
        slot = int(now // SLOT_S)
        if slot == self._slot:
            return
        self._slot = slot
        for roster in jobs.membership.view.rosters:
            marks = [mark for t in roster.ids if (mark := jobs.progress.of(roster, t)) is not None]
            speed = jobs.speeds.get((roster.job, roster.born))
            steps_per_s = None if speed is None else speed.steps.per_s(now)
            ops_per_s = None if speed is None else speed.ops.per_s(now)
            if any(mark.step for mark in marks):
                ops_per_s = None
            readings = readings_of_job(
                roster.job, steps_per_s, ops_per_s, [mark.reports for mark in marks]
            )
            self._history.note(slot, readings)

    async def serve(self, session: Session, request: AskCharts) -> None:
        """Answer with what is known of one job. Raises UsageError if that is nothing."""
        charts = {
            chart.name: (tuple(chart.slots), tuple(chart.values))
            for chart in self._history.charts()
            if chart.job == request.job
        }
        if not charts:
            raise UsageError(self._describe_nothing(request.job))
        slot = int(trio.current_time() // SLOT_S)
        await session.send(JobCharts(slot, SLOT_S, charts))

    def _describe_nothing(self, job: str) -> str:
        running = {roster.job for roster in self._kernel.jobs.membership.view.rosters}
        if job in running:
            return f"job {job!r} has no numbers yet; try again in some seconds"
        names = sorted(running.union(chart.job for chart in self._history.charts()))
        there = (
            f"jobs of the last hour: {', '.join(map(repr, names))}" if names else "there was none"
        )
        return f"no job {job!r} ran in the last hour; {there}"
