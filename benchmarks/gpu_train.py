"""Whole training steps on a CUDA GPU under a memory cap that another process enforces.

    python benchmarks/gpu_train.py --shape 32b --cap-bytes 80e9 [--completion 512] [--steps 2] [-- FLAGS OF qerl.train]

Writes an NVFP4 checkpoint of random weights (qerl/benchmarking/synthetic.py) and prompts of a given length, starts a ballast process that holds
all of the card's memory but the cap, and runs `python -m qerl.train` as a user would, with vLLM, rank 32 and noise from the
second step on. Checked afterwards: every matrix of the adapter has moved away from its initial zeros, so every layer had a
gradient. Recorded: metrics of each step, agreement, the plan's peak and the measured one (by the ballast process, from
what the driver says is free, so everything the run takes is in it). Writes train_SHAPE_CONTEXT_CAP.json into $OUT or
benchmarks/results.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from reports import write_report
from safetensors import safe_open

from qerl.bench_step import StepWork, work_settings
from qerl.benchmarking.device import describe

BALLAST = """
import sys, time, torch
cap = int(float(sys.argv[1]))
torch.zeros(1, device="cuda")
free, total = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - cap), dtype=torch.uint8, device="cuda")
start = least = torch.cuda.mem_get_info()[0]
print("holding", held.numel(), "free", start, flush=True)
while not sys.stdin.closed:
    least = min(least, torch.cuda.mem_get_info()[0])
    with open(sys.argv[2], "w") as file:
        file.write(f"{start} {least}")
    time.sleep(0.1)
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the shape has")
    parser.add_argument("--cap-bytes", type=float, default=80e9)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--completion", type=int, default=512)
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "qerl-gpu-train")
    parser.add_argument("flags", nargs="*", help="more flags of qerl.train, after --")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("gpu_train: no CUDA GPU here, nothing was measured")
        return 0
    options.work.mkdir(parents=True, exist_ok=True)
    model = options.work / f"random-{options.shape}"
    if not (model / "config.json").exists():
        started = time.time()
        subprocess.run(
            [sys.executable, "-c", WRITE, options.shape, str(options.layers), str(model)],
            check=True,
        )
        print(f"checkpoint written in {time.time() - started:.0f} s", flush=True)
    context = options.prompt + options.completion
    run_dir = options.work / f"run-{options.shape}-{context}-{time.time_ns()}"
    command = train_command(options, model, run_dir)
    peak_file = options.work / "peak"
    ballast = subprocess.Popen(
        [sys.executable, "-c", BALLAST, str(options.cap_bytes), str(peak_file)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert ballast.stdout is not None
        print(ballast.stdout.readline(), end="", flush=True)
        started = time.time()
        exit_code, said = run(command)
        seconds = time.time() - started
    finally:
        ballast.kill()
    start, least = map(int, peak_file.read_text().split())
    report = {
        **describe(torch.device("cuda", 0)),
        "run": shlex.join(command[2:]),
        "exit_code": exit_code,
        "seconds": round(seconds, 1),
        "cap_bytes": options.cap_bytes,
        "peak_bytes": start - least,
        "said": said,
        **read_run(run_dir),
    }
    write_report(f"train_{options.shape}_{context}_{options.cap_bytes / 1e9:.0f}gb", report)
    print(json.dumps({k: v for k, v in report.items() if k != "steps"}, indent=1))
    return exit_code


SAID = ("vLLM shares", "vLLM started", "parity", "the longest microbatch", "step ")
"""How the lines of a run begin that are kept"""


def run(command: list[str]) -> tuple[int, dict[str, float]]:
    """Run it and show what it prints. Returns the exit code, and the second at which each line of `SAID` came."""
    started, said = time.time(), {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(SAID):
                said[line.strip()] = round(time.time() - started, 1)
    return process.returncode, said


WRITE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
import torch
from pathlib import Path
from qerl.benchmarking.synthetic import model_config, write_checkpoint
shape, layers, folder = sys.argv[1:]
write_checkpoint(Path(folder), model_config(shape, int(layers)), torch.device("cuda", 0))
"""


def train_command(options: argparse.Namespace, model: Path, run_dir: Path) -> list[str]:
    work = StepWork(
        model=options.shape,
        problems=options.problems,
        samples=options.samples,
        prompt=options.prompt,
        completion=options.completion,
        steps=options.steps,
    )
    settings = {
        **work_settings(work, model, options.work / f"prompts-{options.prompt}.jsonl"),
        "run-dir": str(run_dir),
        "engine": "vllm",
        "memory-gib": str(options.cap_bytes / 2**30),
    }
    flags = [part for key, value in settings.items() for part in (f"--{key}", value)]
    return [sys.executable, "-m", "qerl.train", *flags, *options.flags]


def read_run(run_dir: Path) -> dict:
    """What the run wrote: steps, plan, and how much of the adapter has moved."""
    found: dict = {"steps": []}
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists():
        found["steps"] = [json.loads(line) for line in metrics.read_text().splitlines()]
    for path in sorted(run_dir.glob("*plan*.json")):
        found[path.stem] = json.loads(path.read_text())
    weights = run_dir / "adapter" / "adapter_model.safetensors"
    if weights.exists():
        with safe_open(weights, "pt") as file:
            names = [name for name in file.keys() if "lora_B" in name]  # noqa: SIM118
            moved = sum(bool(file.get_tensor(name).any()) for name in names)
        found["adapter_matrices"] = {"lora_B": len(names), "with_gradient": moved}
    return found


if __name__ == "__main__":
    sys.exit(main())
