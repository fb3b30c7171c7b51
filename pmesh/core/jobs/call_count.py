"""O10: the calls of a program stay in step with those of the other ranks, also after an error.

An error of an op reaches all ranks under one number, but not in the same call of their programs: a
rank that had returned from the op learns of it in its next call (I5), and where calls take several
ops, one rank may be some ops ahead. So each rank counts its calls. After a call that has failed,
the ranks compare their counts before the next one, in a small op of its own. A rank that is behind
fails its calls, without an op, up to the one that the rank furthest ahead has begun.
"""

from pmesh.core.wire.calls import Call

COMPARE = Call("all_reduce", "int64", (1,), "max", tree="calls made, after an error")
"""The op in which ranks compare their counts; the program has not called it."""
MOST_COMPARED = 64  # more than the ops that a rank may be ahead: twice `MAX_UNSTABLE_OPS`


class CallCount:
    """The calls of one rank since its job began, or since the last `sync`."""

    def __init__(self) -> None:
        self.made = 0
        """How many calls have begun that ran an op, or tried to."""
        self.doubtful = False
        """Whether the ranks must compare their counts before the next call."""
        self.ops = 0
        """How many ops have been called, those in which counts are compared included."""
        self.resumes_at = 0
        """The call from which on this rank takes part; the ones before fail without an op."""
        self._ops_before = 0
        """How many ops had been called when the current call began."""

    def begin(self) -> None:
        """Note that the program makes a call."""
        self.made += 1
        self._ops_before = self.ops

    def compared(self, most: int) -> None:
        """Note that all ranks have compared their counts; the highest is `most`."""
        self.doubtful, self._ops_before = False, self.ops
        self.resumes_at = most

    def why_skipped(self) -> str:
        """Return why this call fails without an op; empty if it takes part."""
        if self.made >= self.resumes_at:
            return ""
        return (
            f"this call was not made, as this rank is behind: after an error the ranks have "
            f"compared how many calls each has made, this is call {self.made}, and they go on "
            f"together from call {self.resumes_at}"
        )

    def failed(self) -> None:
        """Note that the call has ended with an error."""
        if self.ops > self._ops_before:
            self.doubtful = True  # another rank may have seen it end well, or in another call
        elif not self.why_skipped():
            self.made -= 1  # no other rank knows of this call

    def synced(self) -> None:
        """Begin to count anew: all ranks, and newcomers, have made the same call, a `sync`."""
        self.made, self.resumes_at, self.doubtful = 0, 0, False
