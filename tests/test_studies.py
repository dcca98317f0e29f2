"""The small experiments that the notebooks show."""

import pandas as pd
import pytest

from qerl import studies
from qerl.errors import UserError


def test_a_row_by_hand_multiplies_back():
    weights = [0.1 * i - 0.75 for i in range(16)] + [0.01 * i for i in range(16)]
    frame = studies.nvfp4_by_hand(weights)
    product = frame["value"] * frame["block_scale"] * frame["dequant_scale"]
    assert product.tolist() == pytest.approx(frame["comes back as"].tolist(), rel=1e-6)
    assert (frame["comes back as"] - frame["weight"]).tolist() == pytest.approx(
        frame["error"].tolist(), abs=1e-7
    )
    assert [studies.E2M1_VALUES[int(code, 2)] for code in frame["code"]] == frame["value"].tolist()
    assert frame["value"].abs()[:16].max() == 6
    with pytest.raises(UserError, match="four_over_six"):
        studies.nvfp4_by_hand(weights, rounding="up")


def test_better_roundings_have_smaller_errors():
    errors = studies.nvfp4_errors(64, 512)["SQNR dB"]
    assert errors["nearest"] < errors["four_over_six"] < errors["mse"]


def test_schedules_stop_where_they_are_told():
    frame = studies.noise_schedules(50, stop_at=0.6)
    assert (frame.iloc[30:] == 0).all().all() and (frame.iloc[5:30] > 0).all().all()


def test_the_probe_sees_what_bf16_norms_lose():
    frame = studies.probe_noise(
        "tiny",
        (1e-4, 1e-2),
        num_problems=2,
        num_draws=1,
        task={"name": "reasoning-gym/chain_sum", "train_size": 8, "test_size": 4},
        max_completion_length=8,
        device="cpu",
    )
    rows = {(row.norm_dtype, row.sigma): row for row in frame.itertuples()}
    changed = frame.set_index(["norm_dtype", "sigma"])["norm weights changed"]
    distance = frame.set_index(["norm_dtype", "sigma"])["mean exp|Δ log p|"]
    assert isinstance(frame, pd.DataFrame) and len(rows) == 5
    assert changed["float32", 1e-4] > 0.99 and changed["bfloat16", 1e-4] < 0.01
    assert distance["clean", 0.0] == 1 and distance["bfloat16", 1e-4] < distance["float32", 1e-4]
    assert distance["float32", 1e-4] < distance["float32", 1e-2]


def test_a_base_that_was_not_quantized_loses_nothing():
    text = "One copy of the frozen base serves the sampler and the trainer alike. " * 12
    frame = studies.base_quality(
        "tiny",
        [text],
        bases=("bf16", "nf4", "nvfp4:nearest", "nvfp4:mse"),
        num_generations=2,
        task={"name": "reasoning-gym/chain_sum", "train_size": 8, "test_size": 4},
        max_completion_length=4,
        device="cpu",
    )
    lost = {base: interval.mean for base, interval in frame["nats lost a token"].items()}
    apart = frame["mean exp|Δ log p|"]
    assert lost["bf16"] == 0 and apart["bf16"] == 1
    assert frame["bits a weight"]["bf16"] == 16
    assert 4 < frame["bits a weight"]["nf4"] < frame["bits a weight"]["nvfp4:nearest"] < 4.6
    assert lost["nf4"] != 0 and apart["nvfp4:mse"] > 1
    assert frame["change of accuracy"]["bf16"].mean == 0
    with pytest.raises(UserError, match="256 tokens"):
        studies.base_quality("tiny", ["short"], task={"name": "reasoning-gym/chain_sum"})
