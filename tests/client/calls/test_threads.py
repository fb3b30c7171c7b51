"""Threads that end with the program, and what is told to end them."""

import subprocess
import sys

# The collector runs whenever anything is made. What it collects takes endings away, adds another,
# and leaves new garbage.
ENDINGS_COME_AND_GO = """
import gc, threading
from pmesh.client.calls import threads

class Waiting:
    def __init__(self):
        self.ended = threading.Event()
        threads.start(self.ended.wait, "waiting")
    def end(self):
        print("ended")
        self.ended.set()

class Idle:
    def __init__(self):
        threads.at_end(self, repr)

class Garbage:
    def __init__(self):
        self.itself = self
    def __del__(self):
        if len(idle) > 10:
            del idle[-10:]
            idle.append(Idle())
            Garbage()

waiting = Waiting()
threads.at_end(waiting, Waiting.end)
idle = [Idle() for _ in range(1000)]
gc.set_threshold(1)
Garbage()
"""


def test_endings_may_come_and_go_while_the_program_ends() -> None:
    program = [sys.executable, "-c", ENDINGS_COME_AND_GO]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "ended\n")
