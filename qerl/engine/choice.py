"""Which engine samples, and why: `engine = "auto"` takes vLLM where it can run and the transformers engine elsewhere.

The choice looks at the device and at what is installed, without importing vLLM, so it is known before anything is packed.
It is printed, and written into the run folder.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from qerl.engine.vllm_setup import installed_version, newer_than_run, require_vllm
from qerl.errors import UserError
from qerl.kernels.gemm import require_humming

EngineName = Literal["transformers", "vllm"]


@dataclass(frozen=True)
class EngineChoice:
    """The engine of a run."""

    name: EngineName
    reason: str
    """For people, without the name"""

    def line(self) -> str:
        """One line for the terminal."""
        return f"engine    {self.name} ({self.reason})"


def choose_engine(asked: str, device: torch.device, quant: str) -> EngineChoice:
    """The engine for `asked` (auto, transformers or vllm) on this device.

    Sets vLLM's environment when it is taken, so it must run before anything imports vllm.

    Raises UserError when vllm is asked for and cannot run here; `auto` gives the same message as its reason.
    """
    if asked == "transformers":
        return EngineChoice("transformers", "as asked")
    if asked == "vllm":
        return EngineChoice("vllm", f"as asked; {_where(_require(device, quant), device)}")
    if device.type != "cuda":
        return EngineChoice("transformers", "no GPU is used")
    if installed_version() is None:
        return EngineChoice(
            "transformers",
            "vLLM, which is faster, is not installed: pip install '.[gpu]' in qerl's folder",
        )
    try:
        version = _require(device, quant)
    except UserError as error:
        return EngineChoice("transformers", f"vLLM cannot be used here: {error}")
    return EngineChoice("vllm", _where(version, device))


def engine_elsewhere(asked: str) -> EngineChoice:
    """The engine of a plan for a GPU that is not here; `auto` supposes that vLLM is there."""
    if asked == "transformers":
        return EngineChoice("transformers", "as asked")
    return EngineChoice("vllm", "a plan for a CUDA card that is not here")


def _require(device: torch.device, quant: str) -> str:
    """vLLM's version. Raises UserError when it, or the kernel that multiplies NVFP4 on a GPU, is missing."""
    version = require_vllm(device)
    if device.type == "cuda" and quant == "nvfp4":
        require_humming()
    return version


def _where(version: str, device: torch.device) -> str:
    """vLLM's version and the GPU, which is said by number where several are visible."""
    text = f"vLLM {version}"
    if newer_than_run(version):
        text += ", newer than any that qerl was run with"
    if device.type != "cuda":
        return f"{text} on the CPU"
    text += f" on {torch.cuda.get_device_name(device)}"
    count = torch.cuda.device_count()
    if count > 1:
        text += f", the first of {count} visible GPUs; CUDA_VISIBLE_DEVICES chooses another"
    return text
