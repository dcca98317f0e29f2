"""vLLM's model on the tensors of `BaseWeights`: adopted, never loaded.

vLLM builds a model in three moves, and each asks us: the quantization config gives every linear and embedding the
method that makes its weights (ours registers the base's tensors as they are); the model loader fills what is left
(ours exchanges the norms and fills fused biases); then it is compiled. Nothing dense is ever allocated.

Names are transformers' throughout, and vLLM's fused matrices are named as `BaseWeights` packs them. What exists twice:
block norms that carry noise (the trainer's stay clean), and biases of fused matrices (vLLM wants them in one piece).
The loader ends by comparing the storage of every parameter with the base's, so nothing is loaded behind anyone's back.

vLLM instantiates config and loader itself, so they find the adoption in hand through `_current`.
"""
# pyright: reportMissingImports=false
# vLLM is not part of the environment that types are checked in.

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from qerl.engine.vllm_adapter import AdapterBuffers, Part
from qerl.engine.vllm_arguments import NAME
from qerl.engine.vllm_ops import key_of
from qerl.errors import RunError, UserError
from qerl.quant.base_weights import BaseWeights
from qerl.quant.layout import EMBEDDING, HEAD, is_norm


@dataclass
class Adoption:
    """State: one engine's take-over of a base."""

    base: BaseWeights
    parts: dict[str, tuple[Part, ...]]
    """Adapted members of each fused matrix"""
    noise_norms: tuple[str, ...]
    """Norm modules that need weights of their own"""
    adapters: dict[str, AdapterBuffers] = field(default_factory=dict)
    norms: dict[str, nn.Parameter] = field(default_factory=dict)
    """The engine's own weights of the noise norms, fp32"""
    doubled: dict[str, Tensor] = field(default_factory=dict)
    """Every parameter that is a copy of the base's, by name"""
    unknown: list[str] = field(default_factory=list)
    """Linears of vLLM's model that the base does not have"""
    filled_at: float = 0.0
    """When the model had its weights (time.perf_counter)"""

    def fill(self, model: nn.Module) -> None:
        """Give norms and biases of a freshly built model their values. Raises UserError for what stays unmatched."""
        if self.unknown:
            raise UserError(
                f"engine=vllm: {type(model).__name__} has linears that qerl does not know: "
                f"{_some(self.unknown)}; use --engine transformers"
            )
        for name, module in model.named_modules():
            weight = f"{name}.weight"
            if is_norm(weight) and weight in self.base.tensors:
                self._exchange_norm(name, module)
            elif isinstance(module, LinearBase) and module.bias is not None:
                self._fill_bias(name, module)
            elif isinstance(getattr(module, "act_fn", None), SiluAndMul):
                self._gate_in_linear(module)
        missing = set(self.noise_norms) - set(self.norms)
        if missing:
            raise RunError(
                "setup",
                f"{len(missing)} of {len(self.noise_norms)} norms that carry noise are not in vLLM's model: "
                f"{_some(sorted(missing))}",
            )
        self.verify(model)

    def _exchange_norm(self, name: str, module: nn.Module) -> None:
        clean = self.base.tensors[f"{name}.weight"]
        if name in self.noise_norms:
            module.weight = nn.Parameter(clean.clone(), requires_grad=False)
            self.norms[name] = module.weight
            self.doubled[f"{name}.weight"] = module.weight.data
        else:
            module.weight = nn.Parameter(clean, requires_grad=False)

    def _fill_bias(self, name: str, module: LinearBase) -> None:
        (members,) = [fused.members for fused in self.base.layout.linears if fused.name == name]
        missing = [f"{m}.bias" for m in members if f"{m}.bias" not in self.base.tensors]
        if missing:
            raise UserError(
                f"engine=vllm: {name} has a bias, but the model has no {_some(missing)}"
            )
        biases = [self.base.tensors[f"{member}.bias"] for member in members]
        if len(biases) == 1:
            module.bias = nn.Parameter(biases[0], requires_grad=False)
        else:
            module.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
            self.doubled[f"{name}.bias"] = module.bias.data

    def _gate_in_linear(self, mlp: Any) -> None:
        """Where gate and up carry an adapter, let their linear do what the activation after it would."""
        linear = mlp.gate_up_proj
        if linear.quant_method.parts is not None and linear.bias is None:
            linear.quant_method.gated = True
            mlp.act_fn = nn.Identity()

    def verify(self, model: nn.Module) -> None:
        """Raise RunError unless every parameter is the base's own storage or listed in `doubled`, and none is missing.

        Called after the model is filled, and again after vLLM has finished with it.
        """
        packed = {
            tensor.data_ptr()
            for weight in self.base.linears.values()
            for tensor in weight.tensors().values()
        }
        dense = {tensor.data_ptr() for tensor in self.base.tensors.values()}
        allowed = packed | dense | {tensor.data_ptr() for tensor in self.doubled.values()}
        found = {
            name: parameter.data_ptr()
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        foreign = [name for name, address in found.items() if address not in allowed]
        if foreign:
            raise RunError(
                "setup", f"vLLM's model has parameters that were not adopted: {_some(foreign)}"
            )
        used = set(found.values())
        copied = {name for fused in self.doubled for name in self._sources_of(fused)}
        unused = [
            name
            for name, tensor in self.base.tensors.items()
            if tensor.data_ptr() not in used and name not in copied
        ] + [
            name
            for name, weight in self.base.linears.items()
            if not {tensor.data_ptr() for tensor in weight.tensors().values()} <= used
        ]
        if unused:
            raise RunError("setup", f"vLLM's model does not use {_some(unused)}")

    def _sources_of(self, parameter: str) -> list[str]:
        """The base's tensors that a doubled parameter is a copy of."""
        module, _, leaf = parameter.rpartition(".")
        for fused in self.base.layout.linears:
            if fused.name == module:
                return [f"{member}.{leaf}" for member in fused.members]
        return [parameter]


_current: Adoption | None = None


@contextmanager
def adopting(adoption: Adoption) -> Iterator[None]:
    """While it lasts, a vLLM model that is built takes this adoption's tensors."""
    global _current
    _current = adoption
    try:
        yield
    finally:
        _current = None


def _adoption() -> Adoption:
    if _current is None:
        raise RuntimeError("vLLM asked for weights outside of `adopting`")
    return _current


class _AdoptedLinear(LinearMethodBase):
    """A fused linear on packed weights, with its adapter: y = x W^T + bias + (x A^T) B^T. One object a layer.

    `gated`: an adapted gate and up give silu(gate) * up at once, where the adapter's kernel has both at hand.
    """

    gated = False

    def __init__(self, adoption: Adoption, name: str):
        self.adoption = adoption
        self.name = name
        self.packed = adoption.base.linears[name]
        self.parts = adoption.parts.get(name)

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: object,
    ) -> None:
        packed, expected = self.packed, (sum(output_partition_sizes), input_size_per_partition)
        if packed.shape != expected:
            raise RunError("setup", f"{self.name} is {packed.shape} packed and {expected} in vLLM")
        for field_name, tensor in packed.tensors().items():
            # The operator's key is looked for under a name of its own, the other tensors under theirs.
            leaf = "key" if tensor is key_of(packed) else field_name.replace(".", "_")
            layer.register_parameter(f"qerl_{leaf}", nn.Parameter(tensor, requires_grad=False))
        if self.parts is not None:
            (fused,) = [f for f in self.adoption.base.layout.linears if f.name == self.name]
            buffers = AdapterBuffers.empty(self.parts, fused, params_dtype, packed.device)
            layer.register_buffer("lora_A", buffers.a, persistent=False)
            layer.register_buffer("lora_B", buffers.b, persistent=False)
            self.adoption.adapters[self.name] = buffers

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing: the weights are in the kernel's layout since they were packed."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        num_rows = self.packed.shape[0]
        if self.parts is None:
            y = torch.ops.qerl.packed_linear(x, layer.qerl_key, num_rows)
        else:
            num_outputs = num_rows // 2 if self.gated else num_rows
            y = torch.ops.qerl.adapted_linear(
                x, layer.qerl_key, layer.lora_A, layer.lora_B, num_outputs, self.gated
            )
        return y if bias is None else y + bias


class _UnknownLinear(LinearMethodBase):
    """Stands in where the base has no matrix: allocates nothing, so that all such linears can be listed."""

    def create_weights(self, layer: nn.Module, *_: object, **__: object) -> None:
        """Nothing: `Adoption.fill` refuses the model."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        raise NotImplementedError


class _AdoptedEmbedding(UnquantizedEmbeddingMethod):
    """Embedding or head on the base's tensor, without the rows that vLLM pads a vocabulary with.

    A subclass, because vLLM computes fp32 logits only for heads whose method is this one.
    """

    def __init__(self, weight: Tensor):
        self.weight = weight

    def create_weights(self, layer: nn.Module, *_: object, **__: object) -> None:
        layer.register_parameter("weight", nn.Parameter(self.weight, requires_grad=False))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing: vLLM's own would keep a second, packed copy on a CPU."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight, bias)


@register_quantization_config(NAME)
class QerlConfig(QuantizationConfig):
    """Tells vLLM which method makes a layer's weights."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict) -> "QerlConfig":
        return cls()

    def get_quant_method(
        self, layer: nn.Module, prefix: str
    ) -> LinearMethodBase | UnquantizedEmbeddingMethod | None:
        """None for attention and anything else that has no weights of its own."""
        adoption = _adoption()
        tensors = adoption.base.tensors
        if isinstance(layer, LinearBase):
            if prefix in adoption.base.linears:
                return _AdoptedLinear(adoption, prefix)
            adoption.unknown.append(prefix)
            return _UnknownLinear()
        if isinstance(layer, ParallelLMHead):
            return _AdoptedEmbedding(tensors.get(HEAD, tensors[EMBEDDING]))
        if isinstance(layer, VocabParallelEmbedding):
            return _AdoptedEmbedding(tensors[EMBEDDING])
        return None


@register_model_loader(NAME)
class QerlLoader(BaseModelLoader):
    """Fills a model from the adoption in hand; reads no file."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing: all tensors are here."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        _adoption().fill(model)
        _adoption().filled_at = time.perf_counter()


def _some(names: list[str]) -> str:
    more = len(names) - 8
    return ", ".join(names[:8]) + (f" and {more} more" if more > 0 else "")
