"""The device that is measured, and what a reader of figures has to know."""

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "triton", "vllm", "transformers", "peft", "bitsandbytes", "humming-kernels")


def finish(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def default_device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def describe(device: torch.device) -> dict[str, Any]:
    """What a reader of figures has to know: command, commit, device, versions."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(
            words, capture_output=True, text=True, check=False, cwd=Path(__file__).parent
        ).stdout.strip()
    except OSError:
        commit = ""
    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "commit": commit or "unknown",
        "device": device_name(device),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU with the threads that are used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    processor = platform.processor() or platform.machine()
    return f"CPU ({processor}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
