"""Number formats of the frozen base: a plain-torch reference each, behind one contract (`packed.PackedWeight`)."""

from collections.abc import Callable

from torch import Tensor

from qerl.quant.bf16 import pack_bf16
from qerl.quant.nvfp4 import Rounding, pack_nvfp4
from qerl.quant.packed import PackedWeight


def _pack_nf4(members: list[Tensor], rounding: Rounding) -> PackedWeight:
    from qerl.quant.nf4 import (
        pack_nf4,
    )  # bitsandbytes takes seconds to import; only this format needs it

    return pack_nf4(members)


def _pack_bf16(members: list[Tensor], rounding: Rounding) -> PackedWeight:
    return pack_bf16(members)


FORMATS: dict[str, Callable[[list[Tensor], Rounding], PackedWeight]] = {
    "nvfp4": pack_nvfp4,
    "nf4": _pack_nf4,
    "bf16": _pack_bf16,
}
"""Name in the config -> function that packs the member matrices [N_i, K] of one fused group into one weight.
`rounding` is NVFP4's alone."""
