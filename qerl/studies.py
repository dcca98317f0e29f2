"""Small experiments as data frames: what the notebooks show, and what one may ask of another model.

* `nvfp4_by_hand`: a few weights through codes and scales; `nvfp4_errors`: the error of each rounding.
* `base_quality`: what a format costs, on text and on a task, before any training.
* `noise_schedules`: sigma over the steps of a run; `probe_noise`: what a sigma does to the policy that samples.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from qerl.algo.noise import noise_at
from qerl.build import Inference, build_data, load_tokenizer, open_inference
from qerl.config import NoiseConfig
from qerl.errors import UserError
from qerl.evaluation.policy import correctness_reward, evaluate_policy
from qerl.evaluation.statistics import bootstrap_interval, paired_difference
from qerl.model.scoring import score
from qerl.model.source import resolve_model
from qerl.quant.nvfp4 import BLOCK_SIZE, E2M1_VALUES, ROUNDINGS, Nvfp4Weight, pack_nvfp4
from qerl.quant.packed import dequantize, sqnr_db
from qerl.rollout import generate
from qerl.settings.layers import build_config, layer_of
from qerl.tasks.pool import open_pool
from qerl.types import NoiseDraw, Rollout

NORM_DTYPES = ("float32", "bfloat16")
BASES = ("bf16", "nf4", *(f"nvfp4:{rounding}" for rounding in ROUNDINGS))
PIECE_TOKENS = 256


def e2m1_values() -> pd.DataFrame:
    """The 16 codes and what they stand for."""
    rows = [{"code": f"{code:04b}", "value": value} for code, value in enumerate(E2M1_VALUES)]
    return pd.DataFrame(rows).set_index("code").T


def nvfp4_by_hand(weights: Sequence[float], rounding: str = "nearest") -> pd.DataFrame:
    """One row a weight: its block's scale, its code, the value that comes back, and the error.

    The weights are one row of a matrix, a multiple of 16 of them. weight ~ value * block_scale * dequant_scale.
    """
    _check_rounding(rounding)
    matrix = torch.tensor([list(weights)], dtype=torch.float32)
    packed = pack_nvfp4([matrix], rounding)  # pyright: ignore[reportArgumentType]
    scales = packed.block_scales.float().repeat_interleave(BLOCK_SIZE, 1)[0]
    codes = _codes(packed)
    back = dequantize(packed, torch.float32)[0]
    return pd.DataFrame(
        {
            "weight": matrix[0].tolist(),
            "block": [index // BLOCK_SIZE for index in range(len(codes))],
            "block_scale": scales.tolist(),
            "dequant_scale": packed.dequant_scale.item(),
            "code": [f"{code:04b}" for code in codes],
            "value": [E2M1_VALUES[code] for code in codes],
            "comes back as": back.tolist(),
            "error": (back - matrix[0]).tolist(),
        }
    )


def nvfp4_errors(num_rows: int = 256, num_columns: int = 1024, seed: int = 0) -> pd.DataFrame:
    """Each rounding on Gaussian weights: signal-to-noise ratio in dB, root mean square and largest error."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(num_rows, num_columns, generator=generator)
    rows = []
    for rounding in ROUNDINGS:
        packed = pack_nvfp4([matrix], rounding)
        error = dequantize(packed, torch.float32) - matrix
        rows.append(
            {
                "rounding": rounding,
                "SQNR dB": sqnr_db(matrix, matrix + error),
                "rms error": error.square().mean().sqrt().item(),
                "largest error": error.abs().max().item(),
                "bits a weight": 8 * packed.nbytes / matrix.numel(),
            }
        )
    return pd.DataFrame(rows).set_index("rounding")


def base_quality(
    model: str,
    texts: Sequence[str],
    *,
    bases: Sequence[str] = BASES,
    num_generations: int = 8,
    **settings: Any,
) -> pd.DataFrame:
    """What a frozen base loses against the first one, which should be bf16: a row each, with 95 % intervals.

    Bits a linear weight; nats a token lost on `texts`, and mean exp|delta log p| there (both over texts, paired with the
    first base); held-out accuracy of the run's task, and its change against the first base on the same problems and seeds.

    Args:
        texts: plain text, cut into pieces of `PIECE_TOKENS` tokens.
        bases: a format, or nvfp4:ROUNDING.
        settings: a run's; the task has to hold something out.
    """
    rows: list[dict[str, Any]] = []
    first: tuple[torch.Tensor, list[float]] | None = None
    for base in bases:
        quant, _, rounding = base.partition(":")
        own = {"quant": quant, **({"rounding": rounding} if rounding else {})}
        logprobs, scores, bits = _measure_base(model, texts, num_generations, settings | own)
        first = first or (logprobs, scores)
        lost = (first[0] - logprobs).mean(dim=1).tolist()
        apart = (first[0] - logprobs).abs().exp().mean().item()
        rows.append(
            {
                "base": base,
                "bits a weight": bits,
                "nats lost a token": bootstrap_interval(lost, seed=0),
                "mean exp|Δ log p|": apart,
                "accuracy": bootstrap_interval(scores, seed=0),
                "change of accuracy": paired_difference(first[1], scores, seed=0),
            }
        )
    return pd.DataFrame(rows).set_index("base")


def _measure_base(
    model: str, texts: Sequence[str], num_generations: int, settings: Mapping[str, Any]
) -> tuple[torch.Tensor, list[float], float]:
    """[pieces, PIECE_TOKENS - 1] log-probabilities of the texts, accuracy a problem, bits a linear weight."""
    config, _ = build_config(layer_of({"model": model, **settings}, "base_quality"))
    source = resolve_model(config.model, config.revision)
    tokenizer = load_tokenizer(source, config.trust_remote_code)
    data = build_data(config, tokenizer, for_training=False)
    if data.test is None:
        raise UserError("base_quality: the task holds nothing out; set test_size or eval_size")
    inference = open_inference(config, source, tokenizer)
    try:
        logprobs, _ = _logprobs(inference, _pieces(tokenizer, texts), None)
        with open_pool(data.rewards, config.reward) as pool:
            evaluation = evaluate_policy(
                inference.engine,
                tokenizer,
                data.test,
                pool,
                data.rewards,
                inference.sampling,
                correctness=correctness_reward(data.rewards, data.task),
                num_generations=num_generations,
                seed=config.seed,
                version=0,
            )
        linears = inference.policy.base.linears.values()
        bits = 8 * sum(w.nbytes for w in linears) / sum(math.prod(w.shape) for w in linears)
    finally:
        inference.engine.close()
    scores = [sum(problem.correct) / len(problem.correct) for problem in evaluation.problems]
    return logprobs.view(-1, PIECE_TOKENS - 1), scores, bits


def _pieces(tokenizer: Any, texts: Sequence[str]) -> list[Rollout]:
    """The texts as completions of their first token."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    pieces = [
        tuple(row[start : start + PIECE_TOKENS])
        for row in ids
        for start in range(0, len(row) - PIECE_TOKENS + 1, PIECE_TOKENS)
    ]
    if not pieces:
        raise UserError(f"base_quality: no text has {PIECE_TOKENS} tokens")
    count = PIECE_TOKENS - 1
    return [
        Rollout(
            problem_id=str(index),
            sample_index=0,
            prompt_ids=piece[:1],
            completion_ids=piece[1:],
            logprobs=(0.0,) * count,
            loss_mask=(True,) * count,
            finish_reason="length",
            version=0,
        )
        for index, piece in enumerate(pieces)
    ]


def noise_schedules(num_steps: int = 100, **noise: Any) -> pd.DataFrame:
    """Sigma of each step under each schedule; `noise` are settings of the noise section."""
    schedules = ("exponential", "linear", "cosine", "logarithmic")
    columns = {}
    for schedule in schedules:
        config = NoiseConfig(schedule=schedule, **noise)
        draws = [noise_at(step, num_steps, 0, config) for step in range(num_steps)]
        columns[schedule] = [draw.sigma if draw else 0.0 for draw in draws]
    return pd.DataFrame(columns).rename_axis("step")


def probe_noise(
    model: str,
    sigmas: Sequence[float] = (1e-4, 1e-3, 1e-2),
    *,
    norm_dtypes: Sequence[str] = NORM_DTYPES,
    num_problems: int = 8,
    num_generations: int = 4,
    num_draws: int = 3,
    **settings: Any,
) -> pd.DataFrame:
    """What noise on the norms does to the policy, on completions that the clean policy sampled.

    A row for each norm dtype and sigma, means over `num_draws` draws: entropy of the noisy policy in nats a token, mean
    exp|delta log p| of the sampled tokens (how far the noisy policy is from the clean one), and the share of norm
    weights that the noise changes at all. The first row is the clean policy. Settings are a run's.
    """
    config, _ = build_config(layer_of({"model": model, **settings}, "probe_noise"))
    source = resolve_model(config.model, config.revision)
    tokenizer = load_tokenizer(source, config.trust_remote_code)
    data = build_data(config, tokenizer)
    problems = data.train if data.test is None else data.test
    inference = open_inference(config, source, tokenizer)
    try:
        chosen = range(min(num_problems, len(problems.problems)))
        address = ("probe_noise", config.seed)
        batch = generate(
            inference.engine,
            tokenizer,
            problems,
            chosen,
            inference.sampling,
            num_generations,
            address,
        )
        rollouts = [rollout for group in batch.rollouts for rollout in group]
        clean, entropy = _logprobs(inference, rollouts, None)
        rows: list[Mapping[str, Any]] = [
            {"norm_dtype": "clean", "sigma": 0.0, "entropy": entropy, "mean exp|Δ log p|": 1.0}
            | {"norm weights changed": 0.0}
        ]
        for norm_dtype in norm_dtypes:
            for sigma in sigmas:
                draws = [
                    NoiseDraw(sigma, config.seed, step, norm_dtype=norm_dtype)  # pyright: ignore[reportArgumentType]
                    for step in range(num_draws)
                ]
                found = [_effect(inference, rollouts, clean, draw) for draw in draws]
                means = {name: sum(row[name] for row in found) / len(found) for name in found[0]}
                rows.append({"norm_dtype": norm_dtype, "sigma": sigma, **means})
    finally:
        inference.engine.close()
    return pd.DataFrame(rows)


def _effect(
    inference: Inference, rollouts: list[Rollout], clean: torch.Tensor, draw: NoiseDraw
) -> dict[str, float]:
    logprobs, entropy = _logprobs(inference, rollouts, draw)
    policy = inference.policy
    before = {name: module.weight.clone() for name, module in policy.noise_modules.items()}
    with policy.noise(draw):
        changed = sum(
            int((module.weight != before[name]).sum())
            for name, module in policy.noise_modules.items()
        )
    total = sum(weight.numel() for weight in before.values())
    return {
        "entropy": entropy,
        "mean exp|Δ log p|": (logprobs - clean).abs().exp().mean().item(),
        "norm weights changed": changed / total,
    }


def _logprobs(
    inference: Inference, rollouts: list[Rollout], draw: NoiseDraw | None
) -> tuple[torch.Tensor, float]:
    """[C] log-probabilities of all sampled tokens, and the mean entropy, under the noise of `draw`."""
    with inference.policy.noise(draw):
        scores = score(inference.policy, rollouts, inference.sampling.temperature)
    return scores.logprobs, scores.entropies.mean().item()


def _codes(packed: Nvfp4Weight) -> list[int]:
    pairs = packed.codes[0].tolist()
    return [code for pair in pairs for code in (pair & 15, pair >> 4)]


def _check_rounding(rounding: str) -> None:
    if rounding not in ROUNDINGS:
        raise UserError(f"rounding={rounding!r}: there are {', '.join(ROUNDINGS)}")
