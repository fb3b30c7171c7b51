import os
import subprocess
import sys
import time

import pytest
import trio
import trio.testing

from pmesh.net.local.clocks import Clocks, Stall, own_stall, read_clocks, tick

NOW = Clocks(elapsed_s=5000.0, awake_s=1000.0)


def later(*, awake_s: float, slept_s: float = 0.0) -> Clocks:
    return Clocks(
        elapsed_s=NOW.elapsed_s + awake_s + slept_s,
        awake_s=NOW.awake_s + awake_s,
    )


@pytest.mark.parametrize(
    ("after", "late_s", "slept_s"),
    [
        (later(awake_s=0.1), 0.0, 0.0),
        (later(awake_s=0.05), 0.0, 0.0),
        (later(awake_s=3.1), 3.0, 0.0),
        (later(awake_s=0.1, slept_s=3600.0), 0.0, 3600.0),
        (later(awake_s=0.6, slept_s=60.0), 0.5, 60.0),
    ],
)
def test_a_stall_is_told_from_a_sleep(after: Clocks, late_s: float, slept_s: float) -> None:
    stall = own_stall(NOW, after, expected_s=0.1)
    assert (stall.late_s, stall.slept_s) == pytest.approx((late_s, slept_s))
    assert stall.total_s == pytest.approx(late_s + slept_s)


def test_both_clocks_run_at_the_same_rate_while_nobody_sleeps() -> None:
    before = read_clocks()
    deadline = time.perf_counter() + 0.01
    while time.perf_counter() < deadline:
        pass
    after = read_clocks()
    assert after.awake_s > before.awake_s
    assert own_stall(before, after, expected_s=1.0).slept_s < 0.005


@pytest.mark.parametrize(
    ("system", "elapsed", "awake"),
    [
        (False, "CLOCK_BOOTTIME", "CLOCK_MONOTONIC"),
        (True, "CLOCK_MONOTONIC", "CLOCK_UPTIME_RAW"),
    ],
)
def test_each_system_has_its_names_for_the_two_clocks(
    system: bool,  # noqa: FBT001 - pytest passes it by name
    elapsed: str,
    awake: str,
) -> None:
    # In its own process: the clocks are chosen when the module is imported.
    program = (
        "import psutil, time\n"
        f"psutil.MACOS = {system}\n"
        "for number, name in enumerate(('BOOTTIME', 'MONOTONIC', 'UPTIME_RAW')):\n"
        "    setattr(time, 'CLOCK_' + name, 100 + number)\n"
        "time.clock_gettime = float\n"
        "from pmesh.net.local.clocks import read_clocks\n"
        f"clocks = read_clocks()\n"
        f"assert clocks.elapsed_s == time.{elapsed}, clocks\n"
        f"assert clocks.awake_s == time.{awake}, clocks\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=dict(os.environ))


async def test_each_tick_tells_what_was_lost_since_the_last(
    autojump_clock: trio.testing.MockClock,
) -> None:
    readings = iter([later(awake_s=0.0), later(awake_s=0.1), later(awake_s=2.7)])
    stalls: list[Stall] = []
    with trio.CancelScope() as scope:

        def judge(stall: Stall) -> None:
            stalls.append(stall)
            if len(stalls) == 2:
                scope.cancel()

        await tick(judge, period_s=0.1, read=lambda: next(readings))
    assert [stall.total_s for stall in stalls] == pytest.approx([0.0, 2.5])
    assert autojump_clock.current_time() == pytest.approx(0.2)
