"""The reward worker process: `python -m qerl.tasks.worker`, started and killed by `pool.RewardPool`.

It reads one message with the reward functions, then calls, and answers each; it ends when the pipe closes or its
parent dies. `calls.py` has the messages.

Standard output and error are the rewards log: what functions print goes there, never into the protocol, which has
file descriptors of its own.
"""

import ctypes
import io
import json
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from qerl.tasks.calling import RewardError, call_reward, load_function
from qerl.tasks.calls import LENGTH, Request, Setup, encode_message

MESSAGE_CHARACTERS = 500
"""A failure's message is cut to this: it becomes one line of a terminal."""


def main(arguments: Sequence[str]) -> None:
    """Serve until the pipe closes. Arguments: request fd, reply fd, parent's pid, memory limit in bytes."""
    request_fd, reply_fd, parent_pid, memory_bytes = map(int, arguments)
    _die_with_parent(parent_pid)
    limit_memory(memory_bytes)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash costs a sample, not disk space
    for fd in (request_fd, reply_fd):
        os.set_inheritable(fd, False)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # a killed worker loses no whole line
    with os.fdopen(request_fd, "rb") as requests, os.fdopen(reply_fd, "wb") as replies:
        serve(requests, replies)
        sys.stdout.flush()
        os._exit(0)  # a thread that a reward left running must not hold the process


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer the setup message and then every request, in order."""
    body = _read_message(requests)
    if body is None:
        return
    setup: Setup = pickle.loads(body)
    sys.path.extend(path for path in setup.sys_path if path not in sys.path)
    functions = []
    for spec in setup.specs:
        try:
            functions.append(load_function(spec.source))
        except BaseException as error:  # a user's file may raise anything, SystemExit included
            traceback.print_exc()
            _reply(
                replies, {"load_error": _cut(f"{type(error).__name__}: {error}"), "name": spec.name}
            )
            return
    _reply(replies, {"ready": True})
    while (body := _read_message(requests)) is not None:
        _reply(replies, _answer(functions, body, setup.num_steps))


def _answer(
    functions: Sequence[Callable[..., Any]], body: bytes, num_steps: int | None
) -> dict[str, Any]:
    try:
        request: Request = pickle.loads(body)
        return vars(call_reward(functions[request.function], request.call, num_steps))
    except RewardError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        return {"kind": error.kind, "message": _cut(str(error))}
    except MemoryError:
        return {"kind": "exception", "message": "MemoryError: more than a reward worker may use"}


def limit_memory(num_bytes: int) -> None:
    """Let allocations beyond `num_bytes` fail with MemoryError instead of filling the machine.

    RLIMIT_DATA counts what is written to. RLIMIT_AS also counts the mapped libraries, and torch with CUDA maps more
    than a reward should use, so it is only a backstop for kernels that do not enforce the first.
    """
    for kind, limit in ((resource.RLIMIT_DATA, num_bytes), (resource.RLIMIT_AS, 4 * num_bytes)):
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(kind, (limit, hard))


def _die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies: a hanging reward would never see its pipe close.

    The kernel means the thread that started the worker. Should that one end first, the pool finds the worker dead while
    idle and replaces it.
    """
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)


def _read_message(stream: BinaryIO) -> bytes | None:
    """The next body, or None when the trainer has closed the pipe."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    body = stream.read(length)
    return body if len(body) == length else None


def _reply(stream: BinaryIO, message: dict[str, Any]) -> None:
    stream.write(encode_message(json.dumps(message).encode()))
    stream.flush()


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MESSAGE_CHARACTERS else line[:MESSAGE_CHARACTERS] + "..."


if __name__ == "__main__":
    main(sys.argv[1:])
