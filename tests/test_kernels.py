"""GPU kernels: Humming's layout, expansion, the packed GEMM, and the table that chooses among them.

On a GPU the Triton kernels run there; without one they run in Triton's interpreter, bit for bit the same checks.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from qerl import kernels
from qerl.errors import UserError
from qerl.kernels import humming_layout
from qerl.kernels.gemm import (
    HummingGemm,
    check_layout,
    pack_with_humming,
    probe_matrix,
    require_humming,
)
from qerl.kernels.humming_layout import HummingWeight, pack, unpack
from qerl.quant.bf16 import pack_bf16
from qerl.quant.nvfp4 import Nvfp4Weight, pack_nvfp4
from qerl.quant.packed import dequantize

GOLDEN = Path(__file__).parent / "golden"
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
INSTRUCTIONS = ("wgmma", "mma")
SHAPES = ((64, 64), (576, 576), (192, 1536), (100, 48), (1, 16))


@pytest.fixture(scope="module")
def triton_expand():
    pytest.importorskip("triton", reason="triton is not installed")
    from qerl.kernels import triton_expand

    return triton_expand


def random_weight(num_rows: int, num_columns: int, seed: int = 0) -> Nvfp4Weight:
    """Random codes; block scales that include zero, E4M3's subnormals and 448."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (num_rows, num_columns // 2), generator=generator)
    scales = torch.randint(0, 127, (num_rows, num_columns // 16), generator=generator)
    scales = scales.to(torch.uint8).view(torch.float8_e4m3fn)
    weight = Nvfp4Weight(codes.to(torch.uint8), scales, torch.tensor(2.0**-7))
    return weight.to(DEVICE)


def raw(tensor: Tensor) -> Tensor:
    """Its bytes, so that -0 differs from 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same_bytes(a: Nvfp4Weight | HummingWeight, b: Nvfp4Weight | HummingWeight) -> bool:
    pairs = zip(a.tensors().values(), b.tensors().values(), strict=True)
    return all(x.shape == y.shape and torch.equal(raw(x), raw(y)) for x, y in pairs)


# ---- layout ----


@pytest.mark.parametrize("mma", INSTRUCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_unpacking_gives_back_what_was_packed(shape, mma):
    weight = random_weight(*shape)
    packed = pack(weight, mma)
    assert packed.shape == weight.shape and packed.is_whole
    assert packed.stored_shape[0] % 256 == 0 and packed.stored_shape[1] % 128 == 0
    assert same_bytes(unpack(packed), weight)


@pytest.mark.parametrize("mma", INSTRUCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_element_is_where_the_closed_form_says(shape, mma):
    """The map as it was measured on an H200, one index at a time; see the module docstring for the same in letters."""
    weight = random_weight(*shape)
    packed = pack(weight, mma)
    num_rows, num_columns = shape
    n = torch.arange(num_rows, device=DEVICE)[:, None]
    k = torch.arange(num_columns, device=DEVICE)[None, :]
    word = (n >> 6) * 128 + (n & 7) * 16 + ((k >> 1) & 3) * 4 + ((n >> 4) & 3)
    row_bit, column_bit = (n >> 3) & 1, (k >> 3) & 1
    low, high = (row_bit, column_bit) if mma == "wgmma" else (column_bit, row_bit)
    nibble = low + 2 * high + 4 * (k & 1)
    stored = (packed.codes[(k >> 4).expand(shape), word] >> (4 * nibble)) & 15
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), dim=-1).flatten(1)
    assert torch.equal(stored, codes.int())
    group = torch.arange(num_columns // 16, device=DEVICE)[None, :]
    column = (n & ~63) + (n & 7) * 8 + ((n >> 3) & 7)
    scales = packed.block_scales.view(torch.uint8)[group.expand(num_rows, -1), column]
    assert torch.equal(scales, weight.block_scales.view(torch.uint8))


@pytest.mark.parametrize(("mma", "nibble"), [("wgmma", 5), ("mma", 6)])
def test_the_example_of_the_page(mma, nibble):
    """docs/kernels.md, element (75, 21)."""
    codes = torch.zeros(128, 16, dtype=torch.uint8)
    codes[75, 21 // 2] = 13 << 4
    scales = torch.zeros(128, 2, dtype=torch.uint8)
    scales[75, 21 // 16] = 99
    packed = pack(Nvfp4Weight(codes, scales.view(torch.float8_e4m3fn), torch.tensor(1.0)), mma)
    assert packed.codes.nonzero().tolist() == [[1, 184]]
    assert packed.codes[1, 184].item() & 0xFFFFFFFF == 13 << (4 * nibble)
    assert packed.block_scales.view(torch.uint8).nonzero().tolist() == [[1, 89]]


def test_padding_is_zero():
    packed = pack(random_weight(576, 576), "wgmma")
    assert packed.stored_shape == (768, 640)
    assert not packed.codes[36:].any() and not packed.codes[:, 2 * 576 :].any()
    scales = packed.block_scales.view(torch.uint8)
    assert not scales[36:].any() and not scales[:, 576:].any()


def test_packing_in_chunks_changes_nothing(monkeypatch):
    weight = random_weight(576, 576)
    whole = pack(weight, "wgmma")
    monkeypatch.setattr(humming_layout, "_CHUNK_BYTES", 1)
    assert same_bytes(pack(weight, "wgmma"), whole)
    assert same_bytes(unpack(whole), weight)


@pytest.mark.parametrize("mma", INSTRUCTIONS)
def test_layout_equals_hummings_own_bytes(mma):
    path = GOLDEN / f"humming_{mma}.txt"  # written by benchmarks/gpu_kernels.py on a GPU
    packed = pack(probe_matrix(128, 64, DEVICE), mma)
    lines = [line.split() for line in path.read_text().splitlines() if not line.startswith("#")]
    parts = {"codes": packed.codes[:4, :256], "block_scales": packed.block_scales[:4, :128]}
    for name, part in parts.items():
        golden = b"".join(bytes.fromhex(digits) for field, digits in lines if field == name)
        assert bytes(raw(part).tolist()) == golden, name


def test_rows_share_storage_and_count_from_their_own_start():
    weight = random_weight(576, 64)
    packed = pack(weight, "wgmma")
    part = packed.rows(64, 192)
    assert part.codes.data_ptr() == packed.codes[:, 128:].data_ptr()
    assert not part.is_whole and packed.rows(0, 576).is_whole
    for start, stop in ((64, 192), (0, 1), (70, 131), (575, 576)):
        view = packed.rows(start, stop)
        assert view.shape == (stop - start, 64)
        assert same_bytes(unpack(view), weight.rows(start, stop))
    assert same_bytes(unpack(packed.rows(70, 300).rows(5, 100)), weight.rows(75, 170))
    with pytest.raises(ValueError, match="not inside"):
        packed.rows(0, 577)


def test_a_humming_weight_keeps_the_contract():
    weight = random_weight(192, 128)
    packed = pack(weight, "wgmma")
    assert packed.nbytes == 256 * 128 * 9 // 16 + 4
    assert packed.device == DEVICE and packed.to(DEVICE) is packed
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert torch.equal(packed.expand(dtype), weight.expand(dtype)), dtype
    assert torch.equal(dequantize(packed, torch.float32), dequantize(weight, torch.float32))


def test_a_probe_matrix_tells_any_two_places_apart_by_its_neighbourhood():
    """Else a wrong permutation could go unseen: all codes and scales occur, about as often as each other."""
    probe = probe_matrix(256, 256, torch.device("cpu"))
    counts = torch.bincount(probe.codes.flatten().int() & 15, minlength=16)
    assert counts.min() > 0.9 * counts.max()
    assert len(probe.block_scales.view(torch.uint8).unique()) == 126
    assert not same_bytes(pack(probe, "wgmma"), pack(probe, "mma"))


# ---- expansion ----


@pytest.mark.parametrize("layout", ("nvfp4", *INSTRUCTIONS))
@pytest.mark.parametrize("shape", SHAPES)
def test_triton_expands_to_the_references_bits(triton_expand, shape, layout):
    weight = random_weight(*shape)
    packed = weight if layout == "nvfp4" else pack(weight, layout)
    run = triton_expand.expand_nvfp4 if layout == "nvfp4" else triton_expand.expand_humming
    num_rows, num_columns = shape
    for start, stop in {(0, num_rows), (num_rows // 3, num_rows - num_rows // 4)}:
        wide = torch.full((stop - start, num_columns + 24), torch.nan, dtype=torch.bfloat16)
        wide = wide.to(DEVICE)
        out = run(packed.rows(start, stop), wide[:, :num_columns])
        assert torch.equal(raw(out), raw(weight.rows(start, stop).expand(torch.bfloat16)))
        assert wide[:, num_columns:].isnan().all(), "wrote beside its rows"


@pytest.mark.parametrize("layout", ("nvfp4", "wgmma"))
def test_triton_knows_every_code_under_every_scale(triton_expand, layout):
    byte = torch.arange(256).repeat(127, 1).to(torch.uint8)
    scales = torch.arange(127).to(torch.uint8)[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    weight = Nvfp4Weight(byte, scales, torch.tensor(1.0)).to(DEVICE)
    out = torch.full(weight.shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
    if layout == "nvfp4":
        triton_expand.expand_nvfp4(weight, out)
    else:
        triton_expand.expand_humming(pack(weight, layout), out)
    exact = weight.expand(torch.float64)
    assert torch.equal(raw(out.double()), raw(exact))


def test_expanding_into_the_wrong_buffer_is_refused(triton_expand):
    weight = random_weight(64, 64)
    for out, message in (
        (torch.empty(64, 64), "has to be bfloat16"),
        (torch.empty(64, 128, dtype=torch.bfloat16), "has to be bfloat16"),
        (torch.empty(64, 68, dtype=torch.bfloat16)[:, :64], "multiples of 16 bytes"),
        (torch.empty(64, 64, dtype=torch.bfloat16).t(), "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            triton_expand.expand_nvfp4(weight, out.to(DEVICE))


# ---- the table ----


def test_expand_equals_each_formats_own():
    members = [torch.randn(64, 128, device=DEVICE, dtype=torch.bfloat16)]
    nvfp4 = pack_nvfp4(members, "nearest")
    for weight in (nvfp4, pack(nvfp4, "wgmma"), pack_bf16(members)):
        for dtype in (torch.bfloat16, torch.float32):
            reference = weight.expand(dtype)
            assert torch.equal(raw(kernels.expand(weight, dtype)), raw(reference))
            out = torch.full_like(reference, torch.nan)
            assert kernels.expand(weight, dtype, out) is out
            assert torch.equal(raw(out), raw(reference))


def test_a_buffer_of_another_shape_is_refused():
    weight = pack_bf16([torch.randn(64, 128, device=DEVICE)])
    with pytest.raises(ValueError, match=r"has to be torch.bfloat16 \(64, 128\)"):
        kernels.expand(weight, torch.bfloat16, torch.empty(1, 128, dtype=torch.bfloat16))


def test_an_unknown_weight_is_an_error_that_lists_what_there_is():
    class Int3Weight:
        device = torch.device("cpu")

    with pytest.raises(
        UserError, match=r"no kernel for Int3Weight on cpu in bfloat16.*Nvfp4Weight on cpu"
    ):
        kernels.expand(Int3Weight(), torch.bfloat16)
    with pytest.raises(
        UserError, match=r"no kernel for Int3Weight.*HummingWeight on cuda from sm_80"
    ):
        kernels.gemm_for(Int3Weight(), torch.bfloat16)


def test_a_gpu_below_sm_80_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))

    class Nvfp4Weight:
        device = torch.device("cuda", 7)

    with pytest.raises(UserError, match=r"no kernel for Nvfp4Weight on cuda sm_75 in bfloat16"):
        kernels.expand(Nvfp4Weight(), torch.bfloat16)
    with pytest.raises(UserError, match=r"compute capability 7\.5"):
        humming_layout.mma_of(torch.device("cuda", 7))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_the_gemm_for_a_weight_multiplies_with_it(dtype):
    weight = random_weight(64, 128)
    x = torch.randn(5, 128, dtype=dtype, device=DEVICE)
    y = kernels.gemm_for(weight, dtype)(x, weight, weight.dequant_scale.item())
    exact = x.double() @ dequantize(weight, torch.float64).t()
    assert y.dtype == dtype
    error = (y.double() - exact).norm() / exact.norm()
    assert error < (4e-3 if dtype == torch.bfloat16 else 1e-6)


def test_a_missing_humming_says_what_to_install():
    if ON_GPU:
        pytest.skip("humming may be installed here")
    with pytest.raises(UserError, match=r"pip install humming-kernels==0\.1\.10"):
        HummingGemm(DEVICE)


# ---- on a GPU ----


@pytest.fixture
def humming() -> str:
    if not ON_GPU:
        pytest.skip("no GPU")
    try:
        return require_humming()
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.gpu
@pytest.mark.parametrize("mma", INSTRUCTIONS)
def test_humming_packs_as_we_do(humming, mma):
    check_layout(DEVICE, mma)
    for shape in ((128, 64), (576, 576)):
        probe = probe_matrix(*shape, DEVICE)
        assert same_bytes(pack_with_humming(probe, mma), pack(probe, mma))


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("mma", INSTRUCTIONS)
@pytest.mark.parametrize("shape", [(576, 576), (512, 1024), (1024, 8192)])
def test_the_packed_gemm_equals_float64(humming, shape, mma, invariant):
    weight = pack(random_weight(*shape), mma)
    multiply = HummingGemm(DEVICE, batch_invariant=invariant)
    for tokens in (0, 1, 24, 300, 2048):
        x = torch.randn(tokens, shape[1], device=DEVICE).bfloat16()
        out = torch.full((tokens, shape[0]), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        exact = x.double() @ dequantize(weight, torch.float64).t()
        y = multiply(x, weight, out)
        assert y.shape == exact.shape
        # Sums rounded once, and bf16 parts of a split K rounded and added (docs/kernels.md).
        assert (y.double() - exact).norm() <= (2.5e-3 if invariant else 8e-3) * exact.norm()
        if invariant:
            assert torch.equal(multiply(x, weight), y)


@pytest.mark.gpu
def test_the_packed_gemm_refuses_a_range_of_rows(humming):
    weight = pack(random_weight(256, 128), humming_layout.mma_of(DEVICE))
    with pytest.raises(ValueError, match="whole matrices"):
        HummingGemm(DEVICE)(torch.zeros(1, 128).bfloat16().to(DEVICE), weight.rows(0, 64))
