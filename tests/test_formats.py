"""The contract that every number format keeps, and NF4 against bitsandbytes and transformers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from qerl.quant import FORMATS, nf4
from qerl.quant.base_weights import BaseWeights
from qerl.quant.nf4 import Nf4Weight
from qerl.quant.packed import PackedWeight, dequantize, sqnr_db

ROWS = (48, 16, 16)
BOUNDS = ((0, 48), (48, 64), (64, 80), (0, 64), (48, 80), (0, 80))


def members(num_columns: int = 128, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_columns)
    return [torch.randn(rows, num_columns, generator=generator).to(dtype) for rows in ROWS]


def pack(format: str, num_columns: int = 128, dtype: torch.dtype = torch.bfloat16) -> PackedWeight:
    return FORMATS[format](members(num_columns, dtype), "nearest")


@pytest.mark.parametrize("format", FORMATS)
def test_shape_bytes_and_dtypes(format: str) -> None:
    weight = pack(format)
    assert weight.shape == (80, 128)
    assert weight.device.type == "cpu"
    assert weight.nbytes == sum(tensor.nbytes for tensor in weight.tensors().values())
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        dense = weight.expand(dtype)
        assert dense.shape == (80, 128)
        assert dense.dtype == dtype
        assert dequantize(weight, dtype).dtype == dtype
    assert torch.equal(weight.expand(torch.float32).bfloat16(), weight.expand(torch.bfloat16))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_between_members_are_the_same_rows_of_the_same_storage(format: str) -> None:
    weight = pack(format)
    dense = dequantize(weight, torch.float32)
    storages = {tensor.untyped_storage().data_ptr() for tensor in weight.tensors().values()}
    for start, stop in BOUNDS:
        part = weight.rows(start, stop)
        assert part.shape == (stop - start, 128)
        assert torch.equal(dequantize(part, torch.float32), dense[start:stop])
        for tensor in part.tensors().values():
            assert tensor.untyped_storage().data_ptr() in storages
    for start, stop in ((-1, 48), (0, 81), (48, 48)):
        with pytest.raises(ValueError, match="rows"):
            weight.rows(start, stop)


@pytest.mark.parametrize("format", FORMATS)
def test_moving_to_the_same_device_copies_nothing(format: str) -> None:
    weight = pack(format)
    moved = weight.to("cpu")
    for name, tensor in weight.tensors().items():
        assert moved.tensors()[name].data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("format", "floor_db", "bits"), [("nvfp4", 20.2, 4.51), ("nf4", 20.4, 4.2), ("bf16", 54, 16)]
)
def test_error_and_size(format: str, floor_db: float, bits: float) -> None:
    weight = pack(format, dtype=torch.float32)
    reference = torch.cat(members(dtype=torch.float32))
    assert floor_db <= sqnr_db(reference, dequantize(weight, torch.float32)) < floor_db + 2
    assert 8 * weight.nbytes / reference.numel() <= bits


def test_bf16_keeps_bf16_weights_and_does_not_copy_them_to_expand() -> None:
    weight = pack("bf16")
    assert torch.equal(weight.expand(torch.bfloat16), torch.cat(members()))
    assert weight.expand(torch.bfloat16).data_ptr() == weight.tensors()["weight"].data_ptr()
    assert weight.dequant_scale is None


def test_nf4_cannot_be_cut_inside_a_member() -> None:
    with pytest.raises(ValueError, match=r"\[0, 48, 64, 80\]"):
        pack("nf4").rows(0, 32)


@pytest.mark.parametrize("num_columns", [64, 96, 100, 128])
def test_nf4_values_from_its_definition(num_columns: int) -> None:
    """From codes and scales by plain torch; blocks run through the flattened matrix, also where rows are no multiple."""
    from bitsandbytes.functional import dequantize_blockwise, get_4bit_type

    weight = pack("nf4", num_columns)
    assert isinstance(weight, Nf4Weight)
    expected = []
    for matrix in weight.members:
        absmax = (
            dequantize_blockwise(matrix.state.absmax, matrix.state.state2) + matrix.state.offset
        )
        byte = matrix.codes.flatten()
        codes = torch.stack([byte >> 4, byte & 15], dim=1).flatten().long()
        values = get_4bit_type("nf4", "cpu")[codes]
        expected.append((values * absmax.repeat_interleave(64)[: len(codes)]).view(matrix.shape))
    assert torch.equal(weight.expand(torch.float32), torch.cat(expected))


@pytest.mark.parametrize("num_columns", [96, 128])
def test_nf4_in_parts_is_double_quantization_of_the_whole(
    num_columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitsandbytes.functional import quantize_4bit

    monkeypatch.setattr(nf4, "_CHUNK_ELEMENTS", 64 * num_columns)
    member = torch.cat(members(num_columns) * 3)  # 240 rows: three parts of 64 and a rest
    weight = nf4.pack_nf4([member])
    codes, state = quantize_4bit(member, blocksize=64, compress_statistics=True, quant_type="nf4")
    (matrix,) = weight.members
    assert torch.equal(matrix.codes, codes)
    assert torch.equal(matrix.state.absmax, state.absmax)
    assert torch.equal(matrix.state.state2.absmax, state.state2.absmax)
    assert torch.equal(matrix.state.offset, state.offset)


def test_nf4_is_what_transformers_loads(tmp_path: Path) -> None:
    """Codes, block maxima and dense values of every linear, bit for bit, of a QLoRA model of the same checkpoint."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=quantization, dtype=torch.bfloat16, device_map="cpu"
    )
    base = BaseWeights.load(
        tmp_path, format="nf4", dtype=torch.bfloat16, device=torch.device("cpu")
    )
    linears = {n: m for n, m in model.named_modules() if isinstance(m, Linear4bit)}
    assert len(linears) == 14
    for name, linear in linears.items():
        (matrix,) = base.packed(name).members
        state = linear.weight.quant_state
        assert torch.equal(matrix.codes, linear.weight.data)
        assert torch.equal(matrix.state.absmax, state.absmax)
        assert torch.equal(matrix.state.offset, state.offset)
        dense = dequantize_4bit(linear.weight.data, state)
        assert torch.equal(base.packed(name).expand(torch.bfloat16), dense)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("format", FORMATS)
def test_moving_to_cuda_and_back_changes_nothing(format: str) -> None:
    weight = pack(format)
    on_gpu = weight.to("cuda")
    assert on_gpu.device.type == "cuda"
    assert torch.equal(on_gpu.expand(torch.float32).cpu(), weight.expand(torch.float32))
    back = on_gpu.to("cpu")
    for name, tensor in weight.tensors().items():
        assert torch.equal(back.tensors()[name].float(), tensor.float())
