"""Writing a packed checkpoint: the folder that `python -m qerl.quantize` makes, and that the cache is made of.

It is an ordinary Hugging Face folder in compressed-tensors' `nvfp4-pack-quantized`: config.json, safetensors in shards of
5 GB, the tokenizer's files copied, and `qerl_packing.json` with the SQNR of each matrix and a checksum of each weight
file. It is written group by group, so memory holds one shard; whoever calls this writes aside and renames.
"""

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from qerl.errors import UserError
from qerl.quant.checkpoint_reader import INDEX_FILE, SINGLE_FILE, Checkpoint, own_copy
from qerl.quant.compressed_tensors_format import file_tensors, packed_shapes, quantization_config
from qerl.quant.layout import Layout, build_layout
from qerl.quant.nvfp4 import Nvfp4Weight, Rounding
from qerl.quant.packing import check_columns, check_tensors, pack_linear
from qerl.quant.report import LinearReport, PackingReport, report_to_json, require_packed

PACKING_FILE = "qerl_packing.json"
PACKING_VERSION = 1
"""Raised when the same source and settings would be packed to other bytes."""
MAX_SHARD_BYTES = 5_000_000_000

_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "LICENSE*",
)
_HEADER_BYTES = 1 << 24
"""Allowance for headers and small files in the estimate of disk space."""


class ShardWriter:
    """Collects tensors and writes them as numbered safetensors shards. State: the shard being filled."""

    def __init__(self, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES):
        self.folder = folder
        self.max_shard_bytes = max_shard_bytes
        self._tensors: dict[str, Tensor] = {}
        self._nbytes = 0
        self._shards: list[list[str]] = []
        self._total_nbytes = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Take tensors that belong together; the shard before them is written first when they do not fit."""
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if self._tensors and self._nbytes + nbytes > self.max_shard_bytes:
            self._flush()
        self._tensors |= tensors
        self._nbytes += nbytes

    def finish(self) -> None:
        """Write the last shard, name the files as transformers does, and write the index if there are several."""
        self._flush()
        total = len(self._shards)
        if total == 1:
            self._part(0).rename(self.folder / SINGLE_FILE)
            return
        weight_map = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{total:05d}.safetensors"
            self._part(number).rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_nbytes}, "weight_map": weight_map}
        _write_json(self.folder / INDEX_FILE, index)

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number}.safetensors"

    def _flush(self) -> None:
        save_file(self._tensors, self._part(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._tensors))
        self._total_nbytes += self._nbytes
        self._tensors, self._nbytes = {}, 0


def write_packed(
    source: Checkpoint,
    folder: Path,
    *,
    rounding: Rounding,
    device: torch.device,
    on_linear: Callable[[LinearReport, int], None] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> PackingReport:
    """Pack a dense checkpoint to NVFP4 into the existing empty `folder`.

    Args:
        source: a bf16, fp16 or fp32 checkpoint. Its other tensors are written in their own dtype.
        on_linear: called after each fused matrix with its report and how many there are in all.

    Raises:
        UserError: the source is quantized already, does not match its config, or the disk has no room.
    """
    if source.quantization is not None:
        raise UserError(f"{source.folder}: already quantized; give the unquantized model")
    layout = build_layout(source.load_config())
    check_tensors(source, layout, packed=False)
    check_columns(source, layout)
    require_space(folder, packed_nbytes(source, layout), f"the packed {source.folder.name}")
    writer = ShardWriter(folder, max_shard_bytes)
    dense = {name: own_copy(source.tensor(name), torch.device("cpu")) for name in layout.dense}
    dense_nbytes = sum(tensor.nbytes for tensor in dense.values())
    writer.add(dense)
    del dense
    linears = []
    for fused in layout.linears:
        weight, linear = pack_linear(source, fused, "nvfp4", rounding, device)
        assert isinstance(weight, Nvfp4Weight)
        writer.add(file_tensors(fused, weight))
        linears.append(linear)
        if on_linear is not None:
            on_linear(linear, len(layout.linears))
    writer.finish()
    report = PackingReport(require_packed(linears), dense_nbytes)
    _write_json(
        folder / "config.json", source.config_data | {"quantization_config": quantization_config()}
    )
    for path in copied_files(source.folder):
        shutil.copyfile(path, folder / path.name)
    _write_json(folder / PACKING_FILE, _packing_record(folder, rounding, report))
    return report


def copied_files(folder: Path) -> list[Path]:
    """The files of a checkpoint that a packed copy takes over unchanged: tokenizer, generation config, licence."""
    found = {path for pattern in _COPIED for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)


def packed_nbytes(source: Checkpoint, layout: Layout) -> int:
    """Bytes that the packed checkpoint will take on disk, a little more than exactly."""
    shapes = packed_shapes(layout)
    packed = sum(rows * (columns[0] if columns else 4) for rows, *columns in shapes.values())
    dense = sum(source.nbytes(name) for name in layout.dense)
    copied = sum(path.stat().st_size for path in copied_files(source.folder))
    return packed + dense + copied + _HEADER_BYTES


def require_space(folder: Path, num_bytes: int, what: str) -> None:
    """Raise UserError unless the file system of the existing `folder` has room for `num_bytes`."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise UserError(
            f"no disk space: {what} needs {num_bytes:,} bytes and {folder.parent} has {free:,} free; "
            "free some, or choose another folder (QERL_CACHE moves the cache)"
        )


def file_checksum(path: Path) -> int:
    """CRC-32 of a file: finds damage, at 3 GB/s, where a cryptographic hash would add 15 s to each start of a 32B model."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _packing_record(folder: Path, rounding: Rounding, report: PackingReport) -> dict:
    files = {
        path.name: {"nbytes": path.stat().st_size, "crc32": file_checksum(path)}
        for path in sorted(folder.glob("*"))
    }
    return {
        "version": PACKING_VERSION,
        "rounding": rounding,
        "files": files,
        "report": report_to_json(report),
    }


def _write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")
