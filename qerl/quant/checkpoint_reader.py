"""Reading a safetensors checkpoint folder: names and shapes from the headers at once, tensors one at a time.

A folder holds config.json and either model.safetensors or model.safetensors.index.json with its shards. Tensors come
as views of the mapped file: reading one costs no memory of its own until it is copied. Everything that can be wrong
with the folder is found from the headers, before the first weight is read.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from qerl.errors import UserError
from qerl.quant.layout import find_family

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MODELOPT_FILE = "hf_quant_config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_OTHER_FORMATS = ("*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.npz")


class Checkpoint:
    """An opened checkpoint folder. State: the mapped weight files."""

    def __init__(self, folder: Path):
        """Raises UserError when config.json or weights are missing, damaged, pickled or of an unsupported model."""
        self.folder = folder
        self.config_data = read_config(folder)
        find_family(self.config_data.get("model_type", ""))
        self.weight_files = find_weight_files(folder)
        self._files = {path: _open(path) for path in self.weight_files}
        self._file_of = {
            name: path
            for path, opened in self._files.items()
            for name in opened.keys()  # noqa: SIM118
        }

    @property
    def names(self) -> set[str]:
        """Names of all tensors in the files."""
        return set(self._file_of)

    @property
    def quantization(self) -> dict | None:
        """`quantization_config` of config.json, or what ModelOpt's own file says; None for a dense checkpoint."""
        return self.config_data.get("quantization_config") or _modelopt_file(self.folder)

    def load_config(self) -> PreTrainedConfig:
        """transformers' config, without `quantization_config`: it describes the model, not the files."""
        try:
            config = AutoConfig.from_pretrained(self.folder)
        # transformers checks few values, so anything may come of a wrong one.
        except Exception as error:
            raise UserError(
                f"{self.folder / 'config.json'}: {type(error).__name__}: {error}"
            ) from error
        vars(config).pop("quantization_config", None)
        return config

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from its header."""
        return tuple(self._slice(name).get_shape())

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor in the file, from its header."""
        count = 1
        for size in self.shape(name):
            count *= size
        return count * _DTYPE_BYTES[self._slice(name).get_dtype()]

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU, backed by the mapped file: copy what is kept, never write to it."""
        return self._files[self._file_of[name]].get_tensor(name)

    def _slice(self, name: str):
        return self._files[self._file_of[name]].get_slice(name)


_DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "U8": 1,
    "I8": 1,
    "I32": 4,
    "I64": 8,
}


def read_config(folder: Path) -> dict:
    """config.json as it stands. Raises UserError when there is none or it is no JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"{folder}: no config.json there; a model folder holds config.json and safetensors files"
        )
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: not a JSON object")
    return data


def _modelopt_file(folder: Path) -> dict | None:
    """hf_quant_config.json in the form of a `quantization_config`. UserError when it is damaged."""
    path = folder / MODELOPT_FILE
    if not path.is_file():
        return None
    try:
        return {"quant_method": "modelopt", **json.loads(path.read_text())["quantization"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged; download the model again") from error


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, sorted. Raises UserError when there are none or a shard is missing."""
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{index}: damaged index; download the model again") from error
        elsewhere = [name for name in names if Path(name).name != name]
        if elsewhere:
            raise UserError(f"{index} names a file outside its folder: {elsewhere[0]}")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"{folder}: {len(missing)} of {len(names)} weight files are missing: {', '.join(missing[:3])}; "
                "download the model again"
            )
        return tuple(folder / name for name in names)
    if (folder / SINGLE_FILE).is_file():
        return (folder / SINGLE_FILE,)
    pickles, others = (
        sorted(path.name for pattern in patterns for path in folder.glob(pattern))
        for patterns in (_PICKLES, _OTHER_FORMATS)
    )
    if pickles:
        raise UserError(
            f"{folder}: only pickled weights ({pickles[0]}), which run code when they are read; "
            "convert them to safetensors with save_pretrained"
        )
    if others:
        raise UserError(
            f"{folder}: only {others[0]}, a format that qerl does not read; give the safetensors of this model"
        )
    raise UserError(f"{folder}: no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _open(path: Path):
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise UserError(f"{path}: damaged or cut off ({error}); download it again") from error


def own_copy(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous copy that no longer depends on the mapped file."""
    return tensor.to(device=device, dtype=dtype or tensor.dtype, copy=True).contiguous()
