"""What a started vLLM engine says of itself: what it shares, what exists twice, and where its start-up time went."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from qerl.engine.vllm_weights import Adoption


@dataclass(frozen=True)
class Holdings:
    """Bytes that the engine holds besides its key/value cache."""

    shared: int
    """The base's own tensors: held once, by both"""
    doubled: dict[str, int]
    """Parameters that exist twice, by name"""
    own: dict[str, int]
    """The engine's buffers, by name: the adapter in the activations' dtype, rotary tables"""

    def lines(self) -> list[str]:
        """For people: a summary, then every kind of parameter that exists twice."""
        kinds: dict[str, int] = {}
        for name, num_bytes in self.doubled.items():
            kind = ".".join(part for part in name.split(".") if not part.isdigit())
            kinds[kind] = kinds.get(kind, 0) + num_bytes
        return [
            f"vLLM shares {self.shared:,} bytes of the base with the trainer; {sum(kinds.values()):,} bytes of it exist "
            f"twice, and {sum(self.own.values()):,} bytes are the engine's own copy of the adapter, and rotary tables",
            *(f"  twice: {kind}, {num_bytes:,} bytes" for kind, num_bytes in sorted(kinds.items())),
        ]


@dataclass(frozen=True)
class StartTimes:
    """Seconds of the engine's start, by phase."""

    import_s: float
    kernels_s: float
    """Compiling packed products; kept on disk"""
    model_s: float
    """vLLM's configuration, its model, and the adoption"""
    compile_s: float
    rest_s: float
    """Profiling, the key/value cache, warming up, capturing CUDA graphs"""

    def line(self) -> str:
        """For the terminal."""
        return (
            f"vLLM started: kernels {self.kernels_s:.1f} s, import {self.import_s:.1f} s, model {self.model_s:.1f} s, "
            f"compile {self.compile_s:.1f} s, cache, warm-up and CUDA graphs {self.rest_s:.1f} s"
        )


def holdings_of(adoption: "Adoption", model: nn.Module) -> Holdings:
    """Counted from the adoption and the model's buffers."""
    return Holdings(
        shared=adoption.base.nbytes,
        doubled={name: tensor.nbytes for name, tensor in adoption.doubled.items()},
        own={name: buffer.nbytes for name, buffer in model.named_buffers()},
    )
