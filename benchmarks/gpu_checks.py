"""What a card has to show besides speed, a section each; JSON after every section, so that what was found is kept.

    python benchmarks/gpu_checks.py [SECTION ...] [--shape 0.5b] [--layers 4]

    agreement   the engine's log-probs are the trainer's, for every format: the parity gate, and with noise; scored without the noise
                that they were sampled with they must be worse
    cache       rank 32, then 64, then bf16 norms on one compile cache give what fresh caches give, and rank 32 again what it gave
    restart     a second engine in a new process repeats the samples of the first: bit for bit if deterministic; else it is reported
    release     the key/value cache given back and taken again: memory, the same samples, CUDA graphs still launched
    resume      `qerl.train --deterministic`, stopped and continued, writes what an uninterrupted run in another process writes
    doctor      `qerl.doctor`

Weights are random (qerl/benchmarking/synthetic.py). Every engine has a process of its own. Written to checks.json in $OUT, or
benchmarks/results; exit code 1 if a section did not pass. Needs vLLM. On vLLM's CPU build everything runs as far as there is
something to it: no graphs, nothing compiled, nothing released (--shape tiny).
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from reports import write_report
from torch.profiler import ProfilerActivity, profile

from qerl.bench_step import StepWork, work_settings
from qerl.benchmarking.device import default_device, describe, finish
from qerl.benchmarking.processes import Row, measure_in_process
from qerl.benchmarking.rollout_arms import prompts_of
from qerl.benchmarking.synthetic import SHAPES, model_config, random_base, write_checkpoint
from qerl.config import LoraConfig
from qerl.determinism import CUBLAS_VARIABLE, CUBLAS_WORKSPACES
from qerl.engine.vllm_arguments import VllmOptions
from qerl.engine.vllm_engine import VllmEngine
from qerl.engine.vllm_setup import installed_version
from qerl.metrics import read_metrics
from qerl.model.policy import Policy
from qerl.model.scoring import score
from qerl.parity import STOP, check_parity
from qerl.quant.layout import is_norm
from qerl.types import GenerationRequest, NoiseDraw, Rollout, Sampling

FORMATS = ("nvfp4", "nf4", "bf16")
DRAW = NoiseDraw(sigma=5e-2, seed=0, step=1)
"""Large, so that it stands out from bf16's rounding"""
PROMPT, TOKENS, SEQUENCES = 200, 64, 32
CACHE_BYTES = 2**30
MARGIN_BYTES = 2**26
"""Of what was given back, not used by someone else"""
UNSTABLE = ("time/", "memory/", "throughput/")
"""Metrics that depend on the machine's speed"""


@dataclass(frozen=True)
class Setup:
    """An engine that is started in a process of its own."""

    shape: str
    layers: int
    format: str = "nvfp4"
    rank: int = 32
    norms: str = "float32"
    deterministic: bool = True
    cache: str | None = None
    """VLLM_CACHE_ROOT; None: as it is"""


def start(setup: Setup) -> tuple[Policy, VllmEngine]:
    """A policy whose adapter does something, and its engine."""
    if setup.cache is not None:
        os.environ["VLLM_CACHE_ROOT"] = setup.cache
    os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_WORKSPACES[0])
    base = random_base(model_config(setup.shape, setup.layers), setup.format, default_device())
    dtype = getattr(torch, setup.norms)
    base = replace(
        base, tensors={n: t.to(dtype) if is_norm(n) else t for n, t in base.tensors.items()}
    )
    lora = LoraConfig(lora_r=setup.rank, lora_alpha=2 * setup.rank)
    policy = Policy(base, lora, model_name="random", seed=0)
    fill_adapter(policy, 0.02)
    options = VllmOptions(
        max_model_len=2 * (PROMPT + TOKENS),
        max_num_seqs=SEQUENCES,
        kv_cache_bytes=CACHE_BYTES,
        max_num_batched_tokens=8192,  # less would cut prompts, which the CPU build cannot do with seeds
        deterministic=setup.deterministic,
        releases_cache=True,
    )
    return policy, VllmEngine(policy, options)


def fill_adapter(policy: Policy, scale: float) -> None:
    """Random B [N, r] with this standard deviation."""
    generator = torch.Generator(policy.device).manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.trainable_parameters():
            if "lora_B" in name:
                parameter.normal_(0, scale, generator=generator)


def sample(engine: VllmEngine) -> list[Rollout]:
    """The same requests each time, their seeds all different."""
    requests = [
        GenerationRequest(str(p), prompt, tuple(1 + 100 * p + i for i in range(count)))
        for p, (prompt, count) in enumerate(prompts_of(SEQUENCES, PROMPT))
    ]
    groups = engine.generate(requests, Sampling(1.0, TOKENS, ()))
    return [rollout for group in groups for rollout in group]


def agreement(policy: Policy, rollouts: list[Rollout]) -> float:
    """Mean exp |log p trainer - log p engine| over all tokens, sampled at temperature 1."""
    scores = score(policy, rollouts, 1.0)
    return (scores.logprobs - scores.recorded).abs().exp().mean().item()


def measure_agreement(setup: Setup) -> Iterator[Row]:
    """One row: the parity gate, the same under noise, and what exists twice."""
    policy, engine = start(setup)
    prompts = [prompt for prompt, _ in prompts_of(SEQUENCES, PROMPT)]
    parity, warning = check_parity(policy, engine, prompts, TOKENS)
    engine.sync(1, DRAW)
    rollouts = sample(engine)
    with policy.noise(DRAW):
        accounted = agreement(policy, rollouts)
    holdings = engine.holdings
    engine.close()
    yield {
        "parity": parity.as_json(),
        "warning": warning,
        "noise": {"accounted": accounted, "unaccounted": agreement(policy, rollouts)},
        "shared_bytes": holdings.shared,
        "twice_bytes": sum(holdings.doubled.values()),
    }


def measure_samples(setup: Setup) -> Iterator[Row]:
    """One row: what is sampled twice under noise, by one engine."""
    policy, engine = start(setup)
    times = engine.start_times
    seen = []
    for _ in range(2):
        engine.sync(1, DRAW)
        seen.append(sample(engine))
    with policy.noise(DRAW):
        agrees = agreement(policy, seen[0])
    engine.close()
    yield {
        "samples": numbers_of(seen[0]),
        "repeats": numbers_of(seen[0]) == numbers_of(seen[1]),
        "mean_exp_difference": agrees,
        "start_s": {name: round(value, 1) for name, value in asdict(times).items()},
    }


def measure_release(setup: Setup) -> Iterator[Row]:
    """One row: samples and memory before the cache is given back, and after its pages were used by someone else."""
    policy, engine = start(setup)
    device = policy.device
    engine.sync(1, DRAW)
    before, held = sample(engine), used_bytes(device)
    launches = graph_launches(engine, device)
    engine.release()
    released = used_bytes(device)
    if (room := held - released - MARGIN_BYTES) > 0:
        torch.empty(room, dtype=torch.uint8, device=device).fill_(255)
    engine.sync(1, DRAW)
    after, resumed = sample(engine), used_bytes(device)
    launches_after = graph_launches(engine, device)
    engine.close()
    yield {
        "same_samples": numbers_of(before) == numbers_of(after),
        "difference": difference(numbers_of(before), numbers_of(after)),
        "cache_bytes": CACHE_BYTES if device.type == "cuda" else 0,
        "used_bytes": {"before": held, "released": released, "resumed": resumed},
        "graph_launches": {"before": launches, "after": launches_after},
    }


def used_bytes(device: torch.device) -> int:
    """What the driver says is taken of the card; 0 for a CPU, where nothing is given back."""
    if device.type != "cuda":
        return 0
    finish(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def graph_launches(engine: VllmEngine, device: torch.device) -> int:
    """CUDA graphs that are launched while completions are sampled."""
    if device.type != "cuda":
        return 0
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        sample(engine)
        finish(device)
    return sum(e.count for e in recorded.key_averages() if "GraphLaunch" in e.key)


Numbers = list[tuple[tuple[int, ...], tuple[float, ...]]]


def numbers_of(rollouts: list[Rollout]) -> Numbers:
    """(tokens, log-probs) of each."""
    return [(r.completion_ids, r.logprobs) for r in rollouts]


def difference(first: Numbers, second: Numbers) -> dict[str, float]:
    """How many completions are equal, and the largest difference of log-probs up to where tokens differ."""
    largest = 0.0
    for (tokens, logprobs), (others, other_logprobs) in zip(first, second, strict=True):
        for token, other, a, b in zip(tokens, others, logprobs, other_logprobs, strict=True):
            if token != other:
                break
            largest = max(largest, abs(a - b))
    equal = sum(a == b for (a, _), (b, _) in zip(first, second, strict=True))
    return {"equal_completions": equal / len(first), "largest_logprob_difference": largest}


class Checks:
    """The sections. State: the folder they work in, and what is reported."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.setup = Setup(options.shape, options.layers)
        self.folder = folder
        self.log = folder / "engines.log"

    def measured(self, measure: Callable[[Setup], Iterator[Row]], setup: Setup) -> Row:
        """The one row of a process. Raises RuntimeError with its last words when it fails."""
        outcome = measure_in_process(measure, setup, tell=lambda row: None, log=self.log)
        if outcome.failure:
            raise RuntimeError(outcome.failure)
        (row,) = outcome.rows
        return row

    def agreement(self) -> dict[str, Any]:
        found = {
            f: self.measured(measure_agreement, replace(self.setup, format=f)) for f in FORMATS
        }
        under_noise = [row["noise"] for row in found.values()]
        passed = all(n["accounted"] <= min(STOP, n["unaccounted"]) for n in under_noise)
        return {"passed": passed, **found}

    def cache(self) -> dict[str, Any]:
        variants = {
            "rank32": self.setup,
            "rank64": replace(self.setup, rank=64),
            "rank64_bf16_norms": replace(self.setup, rank=64, norms="bfloat16"),
        }
        shared, fresh = {}, {}
        for name, setup in variants.items():
            on_shared = replace(setup, cache=str(self.folder / "shared"))
            shared[name] = self.measured(measure_samples, on_shared)
        again = self.measured(
            measure_samples, replace(self.setup, cache=str(self.folder / "shared"))
        )
        fresh["rank32"] = shared["rank32"]  # the shared cache was fresh then
        for name in list(variants)[1:]:
            alone = replace(variants[name], cache=str(self.folder / name))
            fresh[name] = self.measured(measure_samples, alone)
        pairs = {name: (shared[name]["samples"], fresh[name]["samples"]) for name in variants}
        pairs["rank32_again"] = (shared["rank32"]["samples"], again["samples"])
        samples = [row["samples"] for row in shared.values()]
        differ = all(a != b for i, a in enumerate(samples) for b in samples[:i])
        agree = all(row["mean_exp_difference"] <= STOP for row in shared.values())
        return {
            "passed": differ and agree and all(a == b for a, b in pairs.values()),
            "variants_differ": differ,
            "differences": {name: difference(*pair) for name, pair in pairs.items()},
            "starts": {name: without_samples(row) for name, row in shared.items()}
            | {"rank32_again": without_samples(again)},
        }

    def restart(self) -> dict[str, Any]:
        found = {}
        for name, deterministic in (("deterministic", True), ("usual", False)):
            setup = replace(
                self.setup, deterministic=deterministic, cache=str(self.folder / "shared")
            )
            first, second = (self.measured(measure_samples, setup) for _ in range(2))
            found[name] = {
                "same": first["samples"] == second["samples"],
                "same_within_an_engine": first["repeats"] and second["repeats"],
                "difference": difference(first["samples"], second["samples"]),
            }
        steady = found["deterministic"]
        return {"passed": steady["same"] and steady["same_within_an_engine"], **found}

    def release(self) -> dict[str, Any]:
        row = self.measured(measure_release, self.setup)
        used, launches = row["used_bytes"], row["graph_launches"]
        freed = used["before"] - used["released"]
        return {
            "passed": row["same_samples"]
            and freed >= 0.95 * row["cache_bytes"]
            and (not row["cache_bytes"] or launches["after"] == launches["before"] > 0),
            **row,
        }

    def resume(self) -> dict[str, Any]:
        setup = self.setup
        model = self.folder / "model"
        written = measure_in_process(write_model, setup, model, tell=print, log=self.log)
        if written.failure:
            raise RuntimeError(written.failure)
        work = StepWork(
            setup.shape, setup.layers, problems=4, samples=8, prompt=64, completion=TOKENS
        )
        settings = work_settings(work, model, self.folder / "prompts.jsonl")
        settings |= {
            "engine": "vllm",
            "memory-gib": "8",
            "deterministic": "true",
            "save-steps": "2",
            "parity": "never",  # random weights, and a section of its own
        }
        flags = [part for key, value in settings.items() for part in (f"--{key}", value)]
        train = [sys.executable, "-m", "qerl.train", *flags, "--run-dir"]
        whole, cut = self.folder / "whole", self.folder / "cut"
        codes = [self.run([*train, str(whole)]), self.run([*train, str(cut)], stop_after=2)]
        codes.append(self.run([*train, str(cut)]))
        files = (
            "adapter/adapter_model.safetensors",
            f"checkpoints/{work.steps}/optimizer.safetensors",
        )
        same = {file: same_bytes(whole / file, cut / file) for file in files}
        lines = [stable_metrics(run_dir) for run_dir in (whole, cut)]
        same["metrics"] = lines[0] == lines[1] and len(lines[0]) == work.steps
        return {
            "passed": codes == [0, 143, 0] and all(same.values()),
            "exit_codes": codes,
            "same": same,
            "differing_metrics": differing(*lines),
            "steps": read_metrics(whole) if whole.exists() else [],
        }

    def run(self, command: list[str], stop_after: int | None = None) -> int:
        """Run a training command, stopped by SIGTERM after a step if so asked; returns its exit code."""
        with self.log.open("a") as log:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=Path(__file__).parent.parent,
            )
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if line.startswith(f"step {stop_after}/"):
                    process.send_signal(signal.SIGTERM)
            return process.wait()

    def doctor(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "qerl.doctor"]
        root = Path(__file__).parent.parent
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
        lines = done.stdout.splitlines()
        return {"passed": done.returncode == 0, "exit_code": done.returncode, "lines": lines}


def write_model(setup: Setup, folder: Path) -> Iterator[Row]:
    """An NVFP4 checkpoint of random weights."""
    write_checkpoint(folder, model_config(setup.shape, setup.layers), default_device())
    yield {"written": str(folder)}


def without_samples(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "samples"}


def same_bytes(first: Path, second: Path) -> bool:
    return first.exists() and second.exists() and first.read_bytes() == second.read_bytes()


def stable_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the machine's speed."""
    lines = read_metrics(run_dir) if run_dir.exists() else []
    return [
        {k: v for k, v in line.items() if not k.partition("/")[2].startswith(UNSTABLE)}
        for line in lines
    ]


def differing(first: list[dict], second: list[dict]) -> dict[str, list]:
    """ "STEP NAME": both values, of the metrics that are not equal."""
    return {
        f"{a.get('step')} {name}": [a.get(name), b.get(name)]
        for a, b in zip(first, second, strict=False)
        for name in a.keys() | b.keys()
        if a.get(name) != b.get(name)
    }


SECTIONS = ("agreement", "cache", "restart", "release", "resume", "doctor")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--layers", type=int, default=4, help="0: all of the shape's")
    options = parser.parse_args()
    chosen = options.sections or list(SECTIONS)
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if installed_version() is None:
        print("gpu_checks: vLLM is not installed here, nothing was checked")
        return 0
    report: dict[str, Any] = describe(default_device())
    report |= {"shape": options.shape, "layers": options.layers}
    with tempfile.TemporaryDirectory(prefix="qerl-checks-") as name:
        checks = Checks(options, Path(name))
        for section in chosen:
            began = time.monotonic()
            try:
                found = getattr(checks, section)()
            except Exception as error:  # the other sections are still worth their time
                found = {"passed": False, "failure": f"{type(error).__name__}: {error}"}
            if not found["passed"] and checks.log.exists():
                print(checks.log.read_text()[-6000:], file=sys.stderr)
            report[section] = {**found, "seconds": round(time.monotonic() - began, 1)}
            print(section, json.dumps(report[section]), flush=True)
            write_report("checks", report)
    return int(not all(report[section]["passed"] for section in chosen))


if __name__ == "__main__":
    sys.exit(main())
