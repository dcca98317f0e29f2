"""Shapes of the presets' models, so that a plan for one of them needs neither the model nor the hub.

A plan reads the sizes of a model that is on this machine from its files; this table is used when it is not and the hub
cannot be asked. Training never looks at it.
"""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

_NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
_QWEN2 = {
    "Qwen/Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen/Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen/Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen/Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False),
    "Qwen/Qwen2.5-14B": (5120, 13824, 48, 40, 8, 152064, False),
    "Qwen/Qwen2.5-32B": (5120, 27648, 64, 40, 8, 152064, False),
}
_QWEN3 = {
    "Qwen/Qwen3-0.6B": (1024, 3072, 28, 16, 8, 151936, True),
    "Qwen/Qwen3-1.7B": (2048, 6144, 28, 16, 8, 151936, True),
    "Qwen/Qwen3-4B": (2560, 9728, 36, 32, 8, 151936, True),
    "Qwen/Qwen3-8B": (4096, 12288, 36, 32, 8, 151936, False),
    "Qwen/Qwen3-14B": (5120, 17408, 40, 40, 8, 151936, False),
    "Qwen/Qwen3-32B": (5120, 25600, 64, 64, 8, 151936, False),
}
_SMOLLM2 = {"HuggingFaceTB/SmolLM2-135M": (576, 1536, 30, 9, 3, 49152, True)}
_LLAMA = {"meta-llama/Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128256, False)}

_FAMILIES: tuple[tuple[str, dict[str, tuple[Any, ...]], dict[str, Any]], ...] = (
    ("qwen2", _QWEN2, {"max_position_embeddings": 32768}),
    ("qwen3", _QWEN3, {"max_position_embeddings": 40960, "head_dim": 128}),
    ("llama", _LLAMA, {"max_position_embeddings": 131072}),
    ("llama", _SMOLLM2, {"max_position_embeddings": 8192}),
)


def known_config(model: str) -> PreTrainedConfig | None:
    """The config of a preset's model, instruction-tuned or not, as far as sizes go; None for other models."""
    name = model.removesuffix("-Instruct")
    for model_type, shapes, common in _FAMILIES:
        if name in shapes:
            values = dict(zip(_NAMES, shapes[name], strict=True))
            return AutoConfig.for_model(model_type, **values, **common)
    return None
