"""The frozen base: every tensor of the model, once, packed. The engine and the trainer both use these tensors.

`BaseWeights.load` streams a checkpoint one fused group at a time, so that memory never holds more than the packed model
and one dense group. Sources are dense (bf16, fp16, fp32; packed here, for NVFP4 through the disk cache when there is one)
or already NVFP4 (compressed-tensors' or ModelOpt's). The result is the same, bit for bit, with and without the cache.

Dtypes: packed matrices as their format has them; RMSNorm weights fp32 (noise of 5e-4 would vanish in bf16); embeddings,
head and biases in the compute dtype.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from qerl.errors import UserError
from qerl.families import FAMILIES, Family
from qerl.quant import FORMATS
from qerl.quant.checkpoint_reader import Checkpoint, own_copy
from qerl.quant.layout import Layout, build_layout, is_norm
from qerl.quant.nvfp4 import Rounding
from qerl.quant.packed import PackedWeight
from qerl.quant.packed_cache import cached_checkpoint
from qerl.quant.packed_files import check_quantization, read_fused, reading_notes
from qerl.quant.packing import check_columns, check_tensors, pack_linear
from qerl.quant.report import LinearReport, PackingReport, require_packed


@dataclass(frozen=True)
class BaseWeights:
    """A model's weights. Nobody writes to them, save the noise that the rollout puts on norms and takes away again."""

    config: PreTrainedConfig
    """transformers' config of the model, without `quantization_config`"""
    family: Family
    format: str
    """nvfp4, nf4 or bf16"""
    layout: Layout
    linears: dict[str, PackedWeight]
    """Fused matrices by name, e.g. model.layers.0.self_attn.qkv_proj"""
    tensors: dict[str, Tensor]
    """Everything else by parameter name: model.embed_tokens.weight, lm_head.weight unless tied, norms, biases"""
    report: PackingReport

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        format: str,
        rounding: Rounding = "four_over_six",
        dtype: torch.dtype,
        device: torch.device,
        cache_dir: Path | None = None,
        relayout: Callable[[PackedWeight], PackedWeight] | None = None,
    ) -> Self:
        """Read and pack a checkpoint folder.

        Args:
            folder: config.json and safetensors.
            format: a name in `qerl.quant.FORMATS`.
            rounding: how NVFP4 chooses block scales; the other formats have no choice.
            dtype: of embeddings, head and biases.
            device: where the result lives and packing computes.
            cache_dir: folder of the disk cache; None packs in memory. Only NVFP4 from a dense source is cached.
            relayout: brings a packed matrix into a kernel's layout. Called on one at a time, so no second base exists;
                the cache on disk stays in the canonical layout.

        Raises:
            UserError: the folder is no whole checkpoint of a supported model, or is quantized in another format.
        """
        if format not in FORMATS:
            raise ValueError(f"unknown format {format!r}; one of {', '.join(FORMATS)}")
        checkpoint = Checkpoint(Path(folder))
        device = torch.device(device)
        if checkpoint.quantization is not None:
            _check_packed(checkpoint, format)
            return cls._read_packed(checkpoint, None, dtype, device, relayout)
        if format == "nvfp4" and cache_dir is not None:
            cached, report = cached_checkpoint(
                checkpoint, cache_dir, rounding=rounding, device=device
            )
            return cls._read_packed(cached, report, dtype, device, relayout)
        return cls._pack_dense(checkpoint, format, rounding, dtype, device, relayout)

    @classmethod
    def _pack_dense(
        cls,
        checkpoint: Checkpoint,
        format: str,
        rounding: Rounding,
        dtype: torch.dtype,
        device: torch.device,
        relayout: Callable[[PackedWeight], PackedWeight] | None,
    ) -> Self:
        config = checkpoint.load_config()
        layout = build_layout(config)
        check_tensors(checkpoint, layout, packed=False)
        if format == "nvfp4":
            check_columns(checkpoint, layout)
        linears, reports = {}, []
        for fused in layout.linears:
            weight, report = pack_linear(checkpoint, fused, format, rounding, device)
            linears[fused.name] = weight if relayout is None else relayout(weight)
            reports.append(report)
        tensors = _read_dense(checkpoint, layout, dtype, device)
        report = PackingReport(require_packed(reports), _nbytes(tensors))
        family = FAMILIES[config.model_type]
        return cls(config, family, format, layout, linears, tensors, report)

    @classmethod
    def _read_packed(
        cls,
        checkpoint: Checkpoint,
        cached: PackingReport | None,
        dtype: torch.dtype,
        device: torch.device,
        relayout: Callable[[PackedWeight], PackedWeight] | None,
    ) -> Self:
        """Read an NVFP4 checkpoint. `cached` is the report of packing it, when we did."""
        config = checkpoint.load_config()
        layout = build_layout(config)
        check_columns(checkpoint, layout)
        check_tensors(checkpoint, layout, packed=True)
        linears, reports = {}, []
        for fused in layout.linears:
            weight, sqnr_db = read_fused(checkpoint, fused, device)
            linears[fused.name] = weight if relayout is None else relayout(weight)
            reports.append(LinearReport(fused.name, weight.shape, weight.nbytes, sqnr_db))
        tensors = _read_dense(checkpoint, layout, dtype, device)
        linear_reports = require_packed(reports) if cached is None else cached.linears
        notes = reading_notes(checkpoint, reports)
        report = PackingReport(linear_reports, _nbytes(tensors), notes)
        family = FAMILIES[config.model_type]
        return cls(config, family, "nvfp4", layout, linears, tensors, report)

    def packed(self, name: str) -> PackedWeight:
        """The rows of one transformers linear, e.g. model.layers.0.self_attn.k_proj, as a view of its fused matrix.

        Raises ValueError, with the nearest name, for anything else.
        """
        fused, start, stop = self.layout.locate(name)
        return self.linears[fused.name].rows(start, stop)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, packed and dense."""
        return sum(weight.nbytes for weight in self.linears.values()) + _nbytes(self.tensors)

    def checksum(self) -> str:
        """SHA-256 over the name, dtype, shape and bytes of every tensor, packed and dense: equal if nothing changed."""
        digest = hashlib.sha256()
        for name, tensor in self._named_tensors():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            values = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(values.numpy().data)
        return digest.hexdigest()

    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        packed = [
            (f"{name}.{field}", tensor)
            for name, weight in self.linears.items()
            for field, tensor in weight.tensors().items()
        ]
        return sorted([*packed, *self.tensors.items()], key=lambda item: item[0])


def check_source(folder: Path, format: str) -> tuple[PreTrainedConfig, Layout]:
    """All that config and headers can show to be wrong with a checkpoint, before a weight is read.

    Returns the model's config and layout. Raises UserError as `BaseWeights.load` does.
    """
    checkpoint = Checkpoint(Path(folder))
    is_packed = checkpoint.quantization is not None
    if is_packed:
        _check_packed(checkpoint, format)
    config = checkpoint.load_config()
    layout = build_layout(config)
    check_tensors(checkpoint, layout, packed=is_packed)
    if format == "nvfp4":
        check_columns(checkpoint, layout)
    return config, layout


def _check_packed(checkpoint: Checkpoint, format: str) -> None:
    """A checkpoint that is quantized already must be NVFP4 that we read, and NVFP4 must be wanted."""
    check_quantization(checkpoint)
    if format != "nvfp4":
        raise UserError(
            f"{checkpoint.folder}: already quantized; quant={format} needs the unquantized model, or use --quant nvfp4"
        )


def _read_dense(
    checkpoint: Checkpoint, layout: Layout, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """What stays dense: norms in fp32, the rest in `dtype`."""
    return {
        name: own_copy(checkpoint.tensor(name), device, torch.float32 if is_norm(name) else dtype)
        for name in layout.dense
    }


def _nbytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
