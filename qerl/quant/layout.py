"""Which tensors a model consists of, and which of them are packed together.

The names and shapes are transformers' own: the model is built on the meta device, where it costs nothing, and its
parameters are sorted into fused linears (after the family's table) and the rest. Nothing is guessed from a file.
"""

import copy
import difflib
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from qerl.errors import UserError
from qerl.families import FAMILIES, Family

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
MAX_LAYERS = 1000
"""More is a damaged file, and would take for ever to build."""


@dataclass(frozen=True)
class FusedLinear:
    """One matrix to pack: its members' rows on top of each other."""

    name: str
    """e.g. model.layers.0.self_attn.qkv_proj"""
    members: tuple[str, ...]
    """transformers' names in row order, e.g. model.layers.0.self_attn.q_proj"""
    member_rows: tuple[int, ...]
    num_columns: int

    @property
    def num_weights(self) -> int:
        return sum(self.member_rows) * self.num_columns


@dataclass(frozen=True)
class Layout:
    """Every parameter of a model, by name and shape."""

    linears: tuple[FusedLinear, ...]
    dense: dict[str, tuple[int, ...]]
    """Parameters that stay dense, with shapes: embeddings, norms, biases, and the head unless it is tied."""
    tied: bool
    """The head is the embedding."""

    def locate(self, linear: str) -> tuple[FusedLinear, int, int]:
        """(fused matrix, first row, row after the last) of a transformers linear. Raises ValueError for other names."""
        for fused in self.linears:
            if linear in fused.members:
                index = fused.members.index(linear)
                start = sum(fused.member_rows[:index])
                return fused, start, start + fused.member_rows[index]
        known = [member for fused in self.linears for member in fused.members]
        nearest = difflib.get_close_matches(linear, known, n=1)
        raise ValueError(
            f"no packed linear is called {linear!r}"
            + (f"; nearest is {nearest[0]!r}" if nearest else "")
        )


def find_family(model_type: str) -> Family:
    """The family's table. Raises UserError naming the supported ones."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(
            f"model_type {model_type!r} is not supported; qerl knows {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def is_norm(parameter: str) -> bool:
    """Whether a dense parameter is an RMSNorm's weight, which is kept in fp32."""
    return parameter.endswith("norm.weight")


def _build_empty(config: PreTrainedConfig) -> PreTrainedModel:
    """The model on the meta device. Raises UserError for a config that describes none."""
    num_layers = config.num_hidden_layers
    if not isinstance(num_layers, int) or not 0 < num_layers <= MAX_LAYERS:
        raise UserError(
            f"config.json: num_hidden_layers is {num_layers!r}, not a number from 1 to {MAX_LAYERS}"
        )
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(config))
    # transformers checks few values, so anything may come of a wrong one.
    except Exception as error:
        raise UserError(
            f"config.json: transformers cannot build this {config.model_type} "
            f"({type(error).__name__}: {error})"
        ) from error


def build_layout(config: PreTrainedConfig) -> Layout:
    """The layout of the causal language model that `config` describes.

    Raises UserError for an unsupported family, or when the family's table does not cover every linear.
    """
    family = find_family(config.model_type)
    model = _build_empty(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    tied = bool(config.tie_word_embeddings)
    if tied:
        shapes.pop(HEAD, None)
    linears = []
    for layer in range(config.num_hidden_layers):
        for fused, members in family.fused_linears.items():
            names = tuple(f"model.layers.{layer}.{member}" for member in members)
            member_shapes = [shapes.pop(f"{name}.weight") for name in names]
            rows = tuple(shape[0] for shape in member_shapes)
            linears.append(
                FusedLinear(f"model.layers.{layer}.{fused}", names, rows, member_shapes[0][1])
            )
    uncovered = [
        name for name, shape in shapes.items() if len(shape) > 1 and name not in (EMBEDDING, HEAD)
    ]
    if uncovered:
        raise UserError(
            f"{config.model_type}: the family's table leaves out {', '.join(uncovered[:3])}; such a variant is not supported"
        )
    return Layout(tuple(linears), shapes, tied)
