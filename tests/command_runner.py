"""Runs commands one after another in one process, each as `python -m` runs it, and prints what became of them.

    python -P tests/command_runner.py '[["qerl.train", "--model", "tiny"], ...]'

torch takes seconds to import; a process for each of many bad inputs would pay that each time. Everything but the
process' start is the command's own way: its `main` under `run_main`, which decides exit code and output.
"""

import importlib
import json
import os
import sys
import tempfile
import traceback
from functools import partial

from qerl.settings.cli import run_main


def run_command(words: list[str]) -> dict[str, object]:
    """Exit code and output of one command, its file descriptors captured, so that what libraries print counts too."""
    main = importlib.import_module(words[0]).main
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        saved = [os.dup(1), os.dup(2)]
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            run_main(partial(main, words[1:]))
        except SystemExit as stop:
            code = stop.code
        except Exception:  # a defect: what Python itself would do
            traceback.print_exc()
            code = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
            for descriptor in saved:
                os.close(descriptor)
        texts = [file.seek(0) or file.read() for file in (out, err)]
    return {"code": code, "stdout": texts[0], "stderr": texts[1]}


if __name__ == "__main__":
    json.dump([run_command(words) for words in json.loads(sys.argv[1])], sys.stdout)
