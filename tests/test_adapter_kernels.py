"""The adapter beside a packed product: Triton's kernels (in its CPU interpreter where there is no GPU) against float64."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from qerl.checkup.reference import relative_error, with_adapter
from qerl.kernels import gemm_for
from qerl.kernels.adapter import AdaptedGemm, add_adapter, gate
from qerl.quant.bf16 import pack_bf16

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
# The interpreter has no products in bf16.
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
LIMIT = 2.5e-3 if ON_GPU else 1e-6
CASES = [
    # rows of the members, K, rank, tokens, splits
    ((64,), 128, 4, 3, 3),
    ((100,), 96, 1, 1, 1),
    ((48, 16, 32), 96, 8, 17, 4),
    ((128, 128), 256, 48, 5, 8),
    ((80, 80), 48, 64, 33, 2),
    ((576, 192, 192), 576, 32, 2, 32),
]


@pytest.fixture(scope="module")
def triton_adapter():
    pytest.importorskip("triton", reason="triton is not installed")
    from qerl.kernels import triton_adapter

    return triton_adapter


def random_case(rows, num_columns, rank, num_tokens):
    torch.manual_seed(0)
    num_rows = sum(rows)
    x = torch.randn(num_tokens, num_columns, device=DEVICE).to(DTYPE)
    a = torch.randn(len(rows) * rank, num_columns, device=DEVICE).to(DTYPE) * num_columns**-0.5
    b = torch.randn(num_rows, rank, device=DEVICE).to(DTYPE)
    y = torch.randn(num_tokens, num_rows, device=DEVICE).to(DTYPE)
    return x, a, b, y


@pytest.mark.parametrize(("rows", "num_columns", "rank", "num_tokens", "splits"), CASES)
def test_two_launches_add_the_adapter(triton_adapter, rows, num_columns, rank, num_tokens, splits):
    x, a, b, y = random_case(rows, num_columns, rank, num_tokens)
    launch = triton_adapter.Launch(splits, 64, 16, 16, 64, dependent=ON_GPU)
    parts = triton_adapter.shrink(x, a, launch)
    assert parts.shape == (splits, num_tokens, len(rows) * rank)
    exact = with_adapter(y, x, a, b, rows)
    if len(rows) == 2:
        half = exact.shape[1] // 2
        gated = triton_adapter.grow_gated(y, parts, b, rows, launch)
        assert relative_error(gated, functional.silu(exact[:, :half]) * exact[:, half:]) < 2 * LIMIT
    wide = torch.full((num_tokens, y.shape[1] + 16), torch.nan, dtype=DTYPE, device=DEVICE)
    wide[:, : y.shape[1]] = y
    out = triton_adapter.grow(wide[:, : y.shape[1]], parts, b, rows, launch)
    assert relative_error(out, exact) < LIMIT
    assert wide[:, y.shape[1] :].isnan().all(), "written beside the rows"


@pytest.mark.parametrize("num_tokens", [1, 16, 100, 512])
def test_the_chosen_launch_is_right_too(triton_adapter, num_tokens):
    rows = (128, 64, 64)
    x, a, b, y = random_case(rows, 320, 16, num_tokens if ON_GPU else min(num_tokens, 20))
    launch = triton_adapter.launch_for(num_tokens, (sum(rows), 320))
    launch = launch if ON_GPU else replace(launch, dependent=False)
    parts = triton_adapter.shrink(x, a, launch)
    exact = with_adapter(y, x, a, b, rows)
    assert relative_error(triton_adapter.grow(y, parts, b, rows, launch), exact) < LIMIT


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((64, 32), "not 2 members"),
        ((24, 24, 16), "multiple of 16"),
        ((16, 16, 16, 16), "the kernels take 3"),
    ],
)
def test_members_that_do_not_fit_are_refused(triton_adapter, rows, message):
    launch = triton_adapter.Launch(1, 64, 16, 16, 64, dependent=False)
    parts = torch.zeros(1, 2, 4 * len(rows), device=DEVICE)
    b = torch.zeros(64, 4, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        triton_adapter.grow(torch.zeros(2, 64, device=DEVICE), parts, b, rows, launch)


@pytest.mark.parametrize("rows", [(64,), (32, 32), (64, 32, 32)])
@pytest.mark.parametrize("num_tokens", [0, 3, 600])
def test_an_adapted_product_is_the_sum_of_its_parts(rows, num_tokens):
    x, a, b, _ = random_case(rows, 128, 8, num_tokens)
    dense = torch.randn(sum(rows), 128, device=DEVICE).to(DTYPE)
    packed = pack_bf16([dense])
    product = AdaptedGemm(gemm_for(packed, DTYPE), DEVICE, DTYPE)
    exact = with_adapter(x @ packed.expand(DTYPE).t(), x, a, b, rows)
    found = product(x, packed, 1.0, a, b, rows, gated=False)
    assert found.shape == (num_tokens, sum(rows))
    if num_tokens:
        assert relative_error(found, exact) < 2 * LIMIT
    if len(rows) == 2:
        gated = product(x, packed, 1.0, a, b, rows, gated=True)
        assert gated.shape == (num_tokens, sum(rows) // 2)
        if num_tokens:
            assert relative_error(gated, gate(exact)) < 3 * LIMIT


def test_plain_products_add_member_by_member():
    x, a, b, y = random_case((32, 16, 16), 64, 4, 5)
    exact = with_adapter(y, x, a, b, (32, 16, 16))
    assert relative_error(add_adapter(y, x, a, b, (32, 16, 16)), exact) < LIMIT
