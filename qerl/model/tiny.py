"""`--model tiny`: a random Qwen2 small enough to train in a test, with everything a real model folder has.

Two layers, hidden 64, two query heads of 32 sharing one key/value head, tied embeddings: 90,880 parameters. Its 259
tokens are the 256 bytes, so every text can be spelled, then padding 256, start of turn 257 and end of turn 258.
Sampling ends at 258 or 257 (real chat models have several end tokens too), and padding is neither, so code that
finds a sequence's end by comparing with the padding token is caught.

The weights depend on nothing but this file: each parameter is drawn from its own seeded generator, and the global
random state is not touched. Linears have variance 1/fan_in and norms differ from 1, so that an error in either shows
in the logits; embeddings are large enough for the logits to become peaked, so the model can learn. Stored as bfloat16.
"""

from pathlib import Path

from qerl.seeding import derive_seed

PAD_ID, START_ID, END_ID = 256, 257, 258
VOCAB_SIZE = 259

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny(folder: Path) -> None:
    """Write the model into the existing, empty `folder`: config, generation config, weights, tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=END_ID,
        dtype="bfloat16",
        architectures=["Qwen2ForCausalLM"],
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)

    weights = {}
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(derive_seed("tiny", name))
        normal = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.1 * normal
        elif parameter.ndim == 2 and "embed" not in name:
            value = normal * parameter.shape[1] ** -0.5
        elif "embed" in name:
            value = 0.2 * normal
        else:
            value = 0.05 * normal
        weights[name] = value.to(torch.bfloat16)

    config.save_pretrained(folder)
    GenerationConfig(pad_token_id=PAD_ID, eos_token_id=[END_ID, START_ID]).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer():
    """A tokenizer with one token a byte and ChatML turns."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = _byte_letters()
    backend = Tokenizer(
        models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = ("<|pad|>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in specials]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=specials[0],
        unk_token=specials[0],  # never produced; Qwen2Tokenizer would add a 260th token for it
        eos_token=specials[2],
        additional_special_tokens=[specials[1]],
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def _byte_letters() -> list[str]:
    """The printable character that stands for each of the 256 bytes in GPT-2's byte-level alphabet."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    letters = {byte: chr(byte) for byte in printable}
    for position, byte in enumerate(byte for byte in range(256) if byte not in letters):
        letters[byte] = chr(256 + position)
    return [letters[byte] for byte in range(256)]
