"""NVFP4 against compressed-tensors, against brute force, and against the page that teaches it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

from qerl.errors import UserError
from qerl.quant import nvfp4
from qerl.quant.nvfp4 import (
    BLOCK_SIZE,
    E2M1_VALUES,
    ROUNDINGS,
    Nvfp4Weight,
    choose_block_scales,
    encode,
    global_divisor,
    pack_nvfp4,
)
from qerl.quant.packed import dequantize, sqnr_db

GOLDEN = Path(__file__).parent / "golden"
BYTES_FILE = GOLDEN / "nvfp4_bytes.txt"
FLOORS_FILE = GOLDEN / "nvfp4_sqnr_floors.json"
DOCS = Path(__file__).parent.parent / "docs" / "nvfp4.md"

GOLDEN_HEADER = (
    "# Packed bytes of golden_matrix() in tests/test_nvfp4.py, rounding nearest: codes, then E4M3 block scales.",
    "# Source: compressed-tensors 0.17.0 (generate_gparam, calculate_qparams, quantize, pack_fp4_to_uint8).",
    "# qerl must produce the same bytes.",
)

NVFP4_ARGS = QuantizationArgs(
    num_bits=4,
    type="float",
    strategy="tensor_group",
    symmetric=True,
    dynamic=False,
    group_size=BLOCK_SIZE,
    scale_dtype=torch.float8_e4m3fn,
    zp_dtype=torch.float8_e4m3fn,
)


def fixed_matrix(num_rows: int, num_columns: int) -> Tensor:
    """Bell-shaped values from integer arithmetic: the same bits with every version of every library."""
    index = torch.arange(num_rows * num_columns, dtype=torch.int64)
    total = torch.zeros_like(index)
    for multiplier in (2654435761, 2246822519, 3266489917, 668265263):
        total += ((index + 1) * multiplier % 2**32) >> 16
    return ((total - 2 * 65535).float() / 2**20).view(num_rows, num_columns)


def golden_matrix() -> Tensor:
    """fixed_matrix with the cases that are easy to get wrong."""
    weight = fixed_matrix(12, 64)
    weight[0, :16] = 0  # a block of zeros
    weight[1] = 0  # a row of zeros
    weight[2, :16] = torch.tensor(E2M1_VALUES) / 8  # every code, -0 included
    weight[3, :16] *= 1e-6  # far below the smallest block scale
    weight[4, :16] *= 2.0**-7  # in the range of subnormal block scales
    weight[5, 3] = 3.0  # an outlier that sets the global scale
    return weight


def compressed_tensors_pack(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, block scales as float32, global scale [1]) by compressed-tensors' own functions, without torch.compile."""
    divisor = generate_gparam(weight.min(), weight.max())
    blocks = weight.unflatten(-1, (-1, BLOCK_SIZE))
    scales, zero_points = calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), NVFP4_ARGS, global_scale=divisor
    )
    with torch.compiler.set_stance("force_eager"):
        values = quantize(weight, scales, zero_points, NVFP4_ARGS, global_scale=divisor)
    return pack_fp4_to_uint8(values), scales, divisor


def golden_lines(codes: Tensor, block_scales: Tensor) -> list[str]:
    """One line a row: hex of its codes, hex of its E4M3 block scales."""
    scale_bytes = block_scales.to(torch.float8_e4m3fn).view(torch.uint8)
    return [
        f"{bytes(row.tolist()).hex()} {bytes(scales.tolist()).hex()}"
        for row, scales in zip(codes, scale_bytes, strict=True)
    ]


def read_golden() -> list[str]:
    return [line for line in BYTES_FILE.read_text().splitlines() if not line.startswith("#")]


def random_matrix(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, 192, generator=generator) * 10.0 ** (seed - 4)
    if seed % 2:
        weight *= torch.exp(3 * torch.randn(24, 192, generator=generator))
    weight[0, :32], weight[1] = 0, 0
    weight[2, 16:48] *= 1e-4
    return weight


def test_golden_bytes() -> None:
    weight = pack_nvfp4([golden_matrix()], "nearest")
    assert golden_lines(weight.codes, weight.block_scales) == read_golden()


def test_golden_file_is_what_compressed_tensors_writes(golden: Callable[[Path, str], None]) -> None:
    codes, scales, _ = compressed_tensors_pack(golden_matrix())
    golden(BYTES_FILE, "\n".join([*GOLDEN_HEADER, *golden_lines(codes, scales)]) + "\n")


@pytest.mark.parametrize("seed", range(8))
def test_nearest_equals_compressed_tensors(seed: int) -> None:
    reference = random_matrix(seed)
    codes, scales, divisor = compressed_tensors_pack(reference)
    weight = pack_nvfp4([reference], "nearest")
    assert torch.equal(weight.codes, codes)
    assert torch.equal(weight.block_scales.float(), scales)
    assert torch.equal(weight.dequant_scale, 1 / divisor[0])


def test_zeros_equal_compressed_tensors() -> None:
    reference = torch.zeros(4, 32)
    codes, scales, divisor = compressed_tensors_pack(reference)
    for rounding in ROUNDINGS:
        weight = pack_nvfp4([reference], rounding)
        assert torch.equal(weight.codes, codes)
        assert torch.equal(weight.block_scales.float(), scales)
        assert torch.equal(weight.dequant_scale, 1 / divisor[0])
        assert torch.equal(dequantize(weight, torch.float32), reference)


def test_members_are_packed_as_one_matrix_with_the_shared_maximum() -> None:
    members = [random_matrix(4)[:8], random_matrix(5)[:4], random_matrix(3)]
    for rounding in ROUNDINGS:
        fused, whole = pack_nvfp4(members, rounding), pack_nvfp4([torch.cat(members)], rounding)
        assert all(torch.equal(a, b) for a, b in zip(fields(fused), fields(whole), strict=True))


def test_result_does_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = random_matrix(5)
    for rounding in ROUNDINGS:
        whole = pack_nvfp4([reference], rounding)
        monkeypatch.setattr(nvfp4, "_CHUNK_ELEMENTS", {"cpu": 5 * reference.shape[1]})
        chunked = pack_nvfp4([reference], rounding)
        monkeypatch.undo()
        assert all(torch.equal(a, b) for a, b in zip(fields(chunked), fields(whole), strict=True))


def test_bf16_source_is_packed_from_its_exact_values() -> None:
    source = random_matrix(4).bfloat16()
    for rounding in ROUNDINGS:
        narrow, wide = pack_nvfp4([source], rounding), pack_nvfp4([source.float()], rounding)
        assert all(torch.equal(a, b) for a, b in zip(fields(narrow), fields(wide), strict=True))


def fields(weight: Nvfp4Weight) -> tuple[Tensor, Tensor, Tensor]:
    return weight.codes, weight.block_scales.float(), weight.dequant_scale


def test_all_codes_and_nibble_order() -> None:
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    scale = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)
    weight = Nvfp4Weight(codes, scale, torch.tensor(0.25))
    expected = torch.tensor([E2M1_VALUES])
    assert torch.equal(weight.expand(torch.float32), 2 * expected)
    assert torch.equal(dequantize(weight, torch.float32), expected / 2)
    assert torch.equal(torch.signbit(weight.expand(torch.float32)), torch.signbit(expected))
    assert torch.equal(unpack_fp4_from_uint8(codes, 1, 16, torch.float32), expected)


def test_rounding_to_e2m1_goes_to_the_even_code_at_midpoints() -> None:
    magnitudes = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    assert [round_one(value) for value in magnitudes] == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    above = np.nextafter(np.float32(magnitudes), np.float32(9)).tolist()
    assert [round_one(value) for value in above] == [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    below = np.nextafter(np.float32(magnitudes), np.float32(0)).tolist()
    assert [round_one(value) for value in below] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]
    assert [round_one(value) for value in (6.0, 7.0, 1e30, -5.1)] == [6.0, 6.0, 6.0, -6.0]


def round_one(value: float) -> float:
    blocks = torch.full((1, 1, BLOCK_SIZE), value)
    byte = encode(blocks, torch.ones(1, 1))[0, 0].item()
    return E2M1_VALUES[int(byte) & 15]


def test_expand_is_exact_in_every_dtype() -> None:
    every_byte = torch.arange(256, dtype=torch.uint8)
    every_scale = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = every_byte.view(1, 256).expand(0x7F, 256).contiguous()
    scales = every_scale.view(-1, 1).expand(0x7F, 32).contiguous()
    weight = Nvfp4Weight(codes, scales, torch.tensor(1.0))
    values = unpack_fp4_from_uint8(codes, 0x7F, 512, torch.float64)
    product = values * every_scale.double().view(-1, 1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert torch.equal(weight.expand(dtype).double(), product), dtype


def test_expanding_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = pack_nvfp4([random_matrix(4)], "nearest")
    whole = weight.expand(torch.bfloat16)
    monkeypatch.setattr(nvfp4, "_EXPAND_ELEMENTS", 7 * 192)
    assert torch.equal(weight.expand(torch.bfloat16), whole)


def test_rows_are_views() -> None:
    weight = pack_nvfp4([random_matrix(4)], "nearest")
    part = weight.rows(5, 9)
    assert part.shape == (4, 192)
    for name, tensor in part.tensors().items():
        whole = weight.tensors()[name]
        assert tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert torch.equal(part.expand(torch.float32), weight.expand(torch.float32)[5:9])
    with pytest.raises(ValueError, match=r"20\.\.30"):
        weight.rows(20, 30)


def test_four_over_six_takes_the_better_of_two_scales() -> None:
    blocks = fixed_matrix(16, 64).unflatten(1, (-1, BLOCK_SIZE))
    divisor = global_divisor(blocks.abs().max(), "four_over_six")
    chosen = choose_block_scales(blocks, divisor, "four_over_six")
    on_six = e4m3(divisor * (blocks.abs().amax(-1) / 6))
    on_four = e4m3(divisor * (blocks.abs().amax(-1) / 6) * 1.5)
    better = brute_error(blocks, on_four / divisor) < brute_error(blocks, on_six / divisor)
    assert 0.1 < better.float().mean() < 0.9
    assert torch.equal(chosen, torch.where(better, on_four, on_six))
    assert chosen.max() <= 384


def test_mse_finds_what_trying_every_scale_finds() -> None:
    blocks = fixed_matrix(8, 64).unflatten(1, (-1, BLOCK_SIZE))
    divisor = global_divisor(blocks.abs().max(), "mse")
    chosen = brute_error(blocks, choose_block_scales(blocks, divisor, "mse") / divisor)
    every = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    least = torch.stack([brute_error(blocks, s.expand(8, 4) / divisor) for s in every]).amin(0)
    torch.testing.assert_close(chosen, least, rtol=1e-5, atol=0)


def e4m3(scales: Tensor) -> Tensor:
    return scales.to(torch.float8_e4m3fn).float()


def brute_error(blocks: Tensor, scales: Tensor) -> Tensor:
    """Squared error of each block in float64, over all 16 values for each weight: no rounding rule involved."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64) * scales.double()[..., None]
    distance = blocks.double()[..., None] - values[..., None, :]
    return distance.square().amin(-1).sum(-1)


@pytest.mark.parametrize("seed", range(8))
def test_no_block_is_worse_with_mse_than_with_four_over_six(seed: int) -> None:
    blocks = random_matrix(seed).unflatten(1, (-1, BLOCK_SIZE))
    divisor = global_divisor(blocks.abs().max(), "mse")
    errors = {
        rounding: brute_error(blocks, choose_block_scales(blocks, divisor, rounding) / divisor)
        for rounding in ("four_over_six", "mse")
    }
    assert torch.all(errors["mse"] <= errors["four_over_six"] * (1 + 1e-5))


def test_sqnr_floors_and_their_order() -> None:
    reference = fixed_matrix(256, 512)
    floors = json.loads(FLOORS_FILE.read_text())
    found = {
        rounding: sqnr_db(reference, dequantize(pack_nvfp4([reference], rounding), torch.float32))
        for rounding in ROUNDINGS
    }
    assert found["nearest"] + 0.5 < found["four_over_six"] < found["mse"] - 0.3
    for rounding, floor in floors.items():
        assert floor <= found[rounding] < floor + 0.1, rounding
        row = re.search(rf"\| `{rounding}` \|(?: [0-9.]+ \|)+", DOCS.read_text())[0]
        assert f" {found[rounding]:.2f} |" in row


def test_sqnr_of_known_vectors() -> None:
    reference = torch.tensor([[3.0, 4.0]])
    assert sqnr_db(reference, torch.tensor([[3.0, 4.5]])) == pytest.approx(20.0)
    assert sqnr_db(reference, reference) == float("inf")
    assert sqnr_db(torch.zeros(1, 2), reference) == float("-inf")


def test_multiplier_and_divisor_round_trip_in_fp32() -> None:
    """For every mantissa: a multiplier made from a divisor survives being written as a divisor and read again."""
    divisor = (np.arange(2**23, dtype=np.uint32) | np.uint32(130 << 23)).view(np.float32)
    one = np.float32(1)
    multiplier = one / divisor
    assert np.array_equal(one / (one / multiplier), multiplier)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    weight = fixed_matrix(4, 32)
    weight[1, 1] = bad
    with pytest.raises(UserError, match="NaN or infinite"):
        pack_nvfp4([fixed_matrix(2, 32), weight], "nearest")


def test_columns_that_are_no_multiple_of_16_are_refused() -> None:
    with pytest.raises(UserError, match="24"):
        pack_nvfp4([torch.ones(2, 24)], "nearest")


def test_worked_example_of_the_docs() -> None:
    """Every number on the page's worked example, computed."""
    text = DOCS.read_text()
    example = text[text.index("## By hand") : text.index("## Three ways")]
    weights = torch.tensor(
        [float(x) for x in re.search(r"W = \[(.*?)\]", example, re.S)[1].split(",")]
    )
    assert len(weights) == 16
    packed = {rounding: pack_nvfp4([weights[None]], rounding) for rounding in ROUNDINGS}
    for rounding, name in (("nearest", "six"), ("four_over_six", "four")):
        weight = packed[rounding]
        table = re.search(rf"<!-- {name} -->\n(.*?)\n\n", example, re.S)[1]
        rows = {line.split("|")[1].strip(): numbers(line) for line in table.splitlines()[2:]}
        codes = torch.stack([weight.codes & 15, weight.codes >> 4], -1).flatten().tolist()
        assert rows["code"] == codes
        assert rows["E2M1"] == [E2M1_VALUES[code] for code in codes]
        scale = weight.block_scales.double().item() * weight.dequant_scale.double().item()
        assert rows["w / scale"] == [round(w / scale, 2) for w in weights.double().tolist()]
        decoded = dequantize(weight, torch.float64).flatten()
        assert rows["decoded"] == [round(value, 3) for value in decoded.tolist()]
        error = (weights.double() - decoded).square().sum().item()
        assert f"squared error {error:.5f}" in example
        assert weight.codes.flatten().numpy().tobytes().hex(" ").upper() in example
        assert f"{weight.block_scales.item():g}" in example
        assert f"{weight.dequant_scale.item():.6g}" in example
    larger = pack_nvfp4([torch.cat([weights, torch.full((16,), 1.1)])[None]], "nearest")
    ideal = 0.6 / 6 / (1.1 / 2688)
    step = larger.block_scales[0, 0].double() * larger.dequant_scale.double()
    assert f"{ideal:.2f}, E4M3's nearest is {larger.block_scales[0, 0].item():g}" in example
    assert f"= {step.item():.5f}." in example


def numbers(line: str) -> list[float]:
    return [float(cell) for cell in line.split("|")[2:-1]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_packs_and_expands_the_same_bits() -> None:
    reference = random_matrix(5)
    for rounding in ROUNDINGS:
        on_cpu, on_gpu = pack_nvfp4([reference], rounding), pack_nvfp4([reference.cuda()], rounding)
        assert all(
            torch.equal(a, b.cpu()) for a, b in zip(fields(on_cpu), fields(on_gpu), strict=True)
        )
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            assert torch.equal(on_gpu.expand(dtype).cpu(), on_cpu.expand(dtype))
