"""Limits of the system that an agent asks to be raised when it starts."""

import resource

OPEN_FILES = 10_240  # macOS starts programs with 256 and allows this many (OPEN_MAX)
FEW_OPEN_FILES = 1024  # 64 pending connections, 8 links, lanes and arenas of a few jobs, with room


def raise_open_files() -> str | None:
    """Raise the soft limit of open files; a sentence for the user if too few remain."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        allowed, why = soft, "the system allows no more"
    else:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            allowed, why = wanted, "the system allows no more"
        except (OSError, ValueError) as e:
            allowed, why = soft, str(e)
    if allowed == resource.RLIM_INFINITY or allowed >= FEW_OPEN_FILES:
        return None
    return (
        f"only {allowed} files may be open at once ({why}): connections may be refused;"
        f" raise it with 'ulimit -n {FEW_OPEN_FILES}' before 'pmesh up'"
    )
