"""A command's module that is a function as well: `qerl.train(...)` in Python, `python -m qerl.train` in a shell.

A submodule and a function of one name would shadow each other, whichever was imported last; one object cannot.
"""

import importlib
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """Calls the function of `qerl.api` that has the module's name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module("qerl.api"), name)(*args, **kwargs)
