"""qerl: reinforcement learning on large language models with one GPU and one NVFP4 copy of the base.

    import qerl
    run = qerl.train(model="quickstart", max_steps=24)
    run.metrics, run.plot(), run.sample("Calculate 7 + 5."), run.evaluate(), run.close()

Importing this imports nothing else; `qerl.api` has the functions.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl.api import compare, load_comparison, load_run, train

__all__ = ["compare", "load_comparison", "load_run", "train"]
__version__ = "0.1.0"

_COMMANDS = ("train", "compare")
"""Modules that are functions too (`qerl.callable_module`)"""

# On some CPUs bitsandbytes, which PEFT imports, warns that a kernel is missing which nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    if name in _COMMANDS:
        return importlib.import_module(f"qerl.{name}")
    if name in __all__:
        return getattr(importlib.import_module("qerl.api"), name)
    raise AttributeError(f"module 'qerl' has no attribute {name!r}")
