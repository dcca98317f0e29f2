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


def writes_its_turns(name, file):
    """Starts, then writes two rows when it is its turn."""
    yield None
    for number in range(2):
        with open(file, "a") as out:
            out.write(f"{name}{number} ")
        yield {"name": name, "number": number}
