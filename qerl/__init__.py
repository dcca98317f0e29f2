"""qerl: reinforcement learning on large language models with one GPU and one NVFP4 copy of the base."""

import logging

__version__ = "0.1.0"

# On some CPUs bitsandbytes, which PEFT imports, warns that a kernel is missing which nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
