"""Which numbers of a job are charted."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from pmesh.charts.rules.history import ChartReading

STEPS: Final = "steps a second"
OPS: Final = "ops a second"


def readings_of_job(
    job: str,
    steps_per_s: float | None,
    ops_per_s: float | None,
    reports: Iterable[Mapping[str, float]],
) -> Iterator[ChartReading]:
    """Yield the speeds that are known, and the mean of each number that ranks report.

    Args:
        job: its name.
        steps_per_s: None while unknown.
        ops_per_s: None while unknown, and for a job that counts its steps.
        reports: the last report of each rank; what is not finite in it is left out.
    """
    for what, speed in ((STEPS, steps_per_s), (OPS, ops_per_s)):
        if speed is not None and math.isfinite(speed):
            yield ChartReading(job, what, speed)
    reported: dict[str, list[float]] = {}
    for report in reports:
        for what, value in report.items():
            if math.isfinite(value):
                reported.setdefault(what, []).append(value)
    for what, values in reported.items():
        mean = sum(value / len(values) for value in values)
        if math.isfinite(mean):  # of three times the largest number it is not
            yield ChartReading(job, what, mean)
