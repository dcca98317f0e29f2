"""What misbehaving kernels do to the process that the doctor runs them in. No torch here: a child imports this file."""

import os
import signal
import time

from qerl.checkup.finding import Check


def die(connection):
    """End without a word over the pipe, by a segmentation fault."""
    connection.send("a kernel")
    os.write(2, b"double free or corruption\n")
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(connection):
    """One good finding, then nothing any more."""
    connection.send(Check("first", "ok", "fine"))
    connection.send("second")
    time.sleep(60)
