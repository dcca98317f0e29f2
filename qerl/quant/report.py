"""What packing a model did, matrix by matrix: bytes, and signal to quantization noise where a reference was at hand."""

from dataclasses import asdict, dataclass

from qerl.errors import UserError


@dataclass(frozen=True)
class LinearReport:
    """One fused matrix."""

    name: str
    """e.g. model.layers.0.self_attn.qkv_proj"""
    shape: tuple[int, int]
    nbytes: int
    sqnr_db: float | None
    """Against the checkpoint's own values, in dB; infinite when none changed; None when it was read packed, as it is."""


@dataclass(frozen=True)
class PackingReport:
    """All packed matrices, and the size of what stays dense (embeddings, head, norms, biases)."""

    linears: tuple[LinearReport, ...]
    dense_nbytes: int
    notes: tuple[str, ...] = ()
    """What a user should know of how a packed checkpoint was read"""

    @property
    def num_weights(self) -> int:
        """Weights in packed matrices."""
        return sum(linear.shape[0] * linear.shape[1] for linear in self.linears)

    @property
    def packed_nbytes(self) -> int:
        """Bytes of packed matrices."""
        return sum(linear.nbytes for linear in self.linears)


def require_packed(linears: list[LinearReport]) -> tuple[LinearReport, ...]:
    """The reports, once something was packed: a conversion that touched nothing is an error."""
    if not linears:
        raise UserError("no matrix was packed: the model has no decoder layers")
    return tuple(linears)


def report_to_json(report: PackingReport) -> dict:
    """Plain JSON values; read back by `report_from_json`."""
    return asdict(report)


def report_from_json(data: dict) -> PackingReport:
    """Inverse of `report_to_json`. Raises KeyError or TypeError on anything else."""
    linears = tuple(
        LinearReport(**(linear | {"shape": tuple(linear["shape"])})) for linear in data["linears"]
    )
    return PackingReport(linears, data["dense_nbytes"])
