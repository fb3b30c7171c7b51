"""The native library, which is compiled from native/ when pmesh is installed, and loaded when used.

pmesh works without it, with the same results in more time.
"""

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

ABI = 10  # PMESH_ABI in native/pmesh.h
PATH = Path(__file__).with_name("libpmesh.dylib" if sys.platform == "darwin" else "libpmesh.so")

_PROTOTYPES = {
    "pmesh_itemsize": (ctypes.c_uint64, ctypes.c_int32, ctypes.c_int32),
    "pmesh_accumulate": (
        None,
        *(ctypes.c_int32, ctypes.c_int32),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64),
    ),
    "pmesh_finish": (
        None,
        *(ctypes.c_int32, ctypes.c_int32),
        *(ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32),
    ),
    "pmesh_make_nan_equal": (None, ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64),
    "pmesh_runner_new": (ctypes.c_void_p,),
    "pmesh_runner_free": (None, ctypes.c_void_p),
    "pmesh_runner_fd": (ctypes.c_int, ctypes.c_void_p),
    "pmesh_begin": (ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p),
    "pmesh_advance": (ctypes.c_int32, ctypes.c_void_p),
    "pmesh_wait": (ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32),
    "pmesh_hand_over": (ctypes.c_bool, ctypes.c_void_p),
    "pmesh_stop": (None, ctypes.c_void_p),
    "pmesh_end": (ctypes.c_int32, ctypes.c_void_p),
    "pmesh_subflows_new": (
        ctypes.c_void_p,
        *(ctypes.c_void_p, ctypes.c_bool, ctypes.c_int32),
        *(ctypes.c_void_p, ctypes.c_void_p),
    ),
    "pmesh_subflows_free": (None, ctypes.c_void_p),
    "pmesh_subflows_wake_fd": (ctypes.c_int, ctypes.c_void_p),
    "pmesh_subflows_add": (
        ctypes.c_bool,
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64),
        *(ctypes.c_double, ctypes.c_double),
    ),
    "pmesh_subflows_drop": (None, ctypes.c_void_p, ctypes.c_uint32),
    "pmesh_subflows_next_lost": (ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p),
    "pmesh_subflows_pump": (ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool),
    "pmesh_subflows_state": (ctypes.c_uint32, ctypes.c_void_p),
    "pmesh_subflows_has_to_write": (ctypes.c_bool, ctypes.c_void_p, ctypes.c_uint32),
    "pmesh_subflows_take": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64),
    "pmesh_subflows_put": (None, ctypes.c_void_p, ctypes.c_void_p),
    "pmesh_subflows_read": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p),
    "pmesh_subflows_opened": (None, ctypes.c_void_p),
    "pmesh_subflows_next_pace": (ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p),
    "pmesh_layout": (ctypes.POINTER(ctypes.c_uint32),),
    "pmesh_combining_fits": (ctypes.c_bool, ctypes.c_void_p),
    "pmesh_combine": (ctypes.c_bool, ctypes.c_void_p),
    "pmesh_combining_stop": (None, ctypes.c_void_p),
    "pmesh_combining_layout": (ctypes.POINTER(ctypes.c_uint32),),
    "pmesh_meeting_new": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool),
    "pmesh_meeting_free": (None, ctypes.c_void_p),
    "pmesh_server_new": (ctypes.c_void_p, ctypes.c_void_p),
    "pmesh_server_free": (None, ctypes.c_void_p),
    "pmesh_server_fd": (ctypes.c_int, ctypes.c_void_p),
    "pmesh_serve": (None, ctypes.c_void_p),
    "pmesh_recall": (None, ctypes.c_void_p),
    "pmesh_take_ended": (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p),
    "pmesh_persistent_layout": (ctypes.POINTER(ctypes.c_uint32),),
}
"""Of each function that a header of native/ exports: its result and its arguments."""


def library() -> ctypes.CDLL | None:
    """Return the library; None if it can't be used here. Its calls release the GIL."""
    return _load()[0]


def why_missing() -> str:
    """Return why `library` returns None and what to do; empty if it does not."""
    return _load()[1]


def describe(missing: str) -> str:
    """Return how a process works for which `why_missing` returns this.

    >>> describe("")
    'with its native library (without it: PMESH_NATIVE=0)'
    """
    if missing:
        return f"without its native library, which is faster: {missing}"
    return "with its native library (without it: PMESH_NATIVE=0)"


def forget() -> None:
    """Load it anew at the next use, after a test has changed what is there."""
    _load.cache_clear()


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("PMESH_NATIVE") == "0":
        return None, "PMESH_NATIVE=0 is set; unset it"
    if not PATH.exists():
        return None, (
            "no C compiler was found when pmesh was installed; install one (macOS: xcode-select "
            "--install; Debian and Ubuntu: apt install gcc libc6-dev), and then pmesh again"
        )
    try:
        loaded = ctypes.CDLL(str(PATH))
        abi = int(loaded.pmesh_abi())
        for name, (result, *arguments) in _PROTOTYPES.items() if abi == ABI else ():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return None, f"it can't be loaded ({error}); install pmesh again"
    if abi != ABI:
        return None, "it was built for another version of pmesh; install pmesh again"
    return loaded, ""
