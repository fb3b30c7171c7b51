"""What makes an agent odd: another version of the protocol, or a clock that is wrong by years."""

import subprocess
from pathlib import Path

from pmesh.core.wire.link import PROTOCOL_VERSION

OTHER_VERSION = f"""
import pmesh.core.wire.link
pmesh.core.wire.link.PROTOCOL_VERSION = {PROTOCOL_VERSION + 41}
"""

# Without any header, which a machine that has a compiler need not have.
OTHER_CLOCK = """
struct timespec { long seconds, nanoseconds; };
struct timeval { long seconds, microseconds; };
void *dlsym(void *, const char *);
#define NEXT(name) dlsym((void *)-1L, name)
#define YEARS (40L * 365 * 86400)
long time(long *at) {
    long now = ((long (*)(long *))NEXT("time"))(0) + YEARS;
    if (at) *at = now;
    return now;
}
int clock_gettime(int clock, struct timespec *at) {
    int result = ((int (*)(int, struct timespec *))NEXT("clock_gettime"))(clock, at);
    if (!result && clock == 0) at->seconds += YEARS; /* CLOCK_REALTIME */
    return result;
}
int gettimeofday(struct timeval *at, void *zone) {
    int result = ((int (*)(struct timeval *, void *))NEXT("gettimeofday"))(at, zone);
    if (!result) at->seconds += YEARS;
    return result;
}
"""


def compile_clock(folder: Path) -> Path:
    """Return a library that sets a program's clock wrong, as LD_PRELOAD; needs a C compiler."""
    library = folder / "clock.so"
    compiler = ["cc", "-shared", "-fPIC", "-nostdlib", "-w", "-x", "c", "-", "-o", str(library)]
    subprocess.run(compiler, input=OTHER_CLOCK, text=True, check=True)
    return library
