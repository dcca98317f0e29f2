"""qerl: reinforcement learning on large language models with one GPU and one NVFP4 copy of the base."""

__version__ = "0.1.0"
