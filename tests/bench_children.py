"""Arms that go wrong, for tests/test_bench.py: in a module of its own, so that their processes start fast."""

import os
import signal
import time


def some_rows(count):
    for number in range(count):
        yield {"number": number}


def fails_after_a_row():
    yield {"number": 0}
    raise ValueError("no\nroom")


def ends_itself():
    yield {"number": 0}
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
