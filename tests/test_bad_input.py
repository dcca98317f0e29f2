"""Every kind of bad input: one clear line on stderr, exit code 2, before any expensive work, nothing overwritten.

The commands run in subprocesses; those that need torch share one process a test (`command_runner`).
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUNNER = Path(__file__).parent / "command_runner.py"
SHORT = ("--max-steps", "1", "--max-completion-length", "4", "--eval-size", "0", "--lora-r", "2")
SHORT += ("--num-generations", "2", "--prompts-per-step", "2", "--reward-workers", "1")
SUMS = ("--task", "reasoning-gym/chain_sum", "--task.train-size", "8", "--task.test-size", "2")
TINY = ("--model", "tiny", "--device", "cpu", *SHORT)


@dataclass(frozen=True)
class Case:
    """A command line and what its message has to say."""

    argv: tuple[str, ...]
    says: tuple[str, ...]


def run_all(commands: Sequence[Sequence[str]], cwd: Path = ROOT) -> list[dict]:
    """Exit code, stdout and stderr of each command."""
    done = subprocess.run(
        [sys.executable, str(RUNNER), json.dumps([list(map(str, words)) for words in commands])],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout)


def check(cases: Sequence[Case], run_dir: Path, *more: Sequence[str]) -> list[dict]:
    """Run the cases with this run folder; each must be refused in one line and leave no folder behind.

    Returns the outcomes of `more`, which are run after them.
    """
    commands = [
        ("qerl.train", "--run-dir", str(run_dir), *argv)
        for argv in (*(case.argv for case in cases), *more)
    ]
    outcomes = run_all(commands)
    wrong = []
    for case, outcome in zip(cases, outcomes[: len(cases)], strict=True):
        line = outcome["stderr"]
        is_one_line = line.startswith("qerl: error: ") and line.count("\n") == 1
        missing = [part for part in case.says if part not in line]
        if outcome["code"] != 2 or not is_one_line or missing or run_dir.exists():
            wrong.append((case.argv, outcome["code"], line, missing, run_dir.exists()))
    assert not wrong, "\n".join(map(str, wrong))
    return outcomes[len(cases) :]


def write_lines(path: Path, rows: Sequence[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, but the empty lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_names_and_values(tmp_path):
    """Found without torch."""
    settings = tmp_path / "mine.toml"
    settings.write_text("[rollout]\nnum_generation = 4\n")
    section = tmp_path / "section.toml"
    section.write_text("[rollouts]\nnum_generations = 4\n")
    broken = tmp_path / "broken.toml"
    broken.write_text("max_steps = \n")
    cases = [
        Case(("--model", "qwen2.5-7"), ("unknown model 'qwen2.5-7'", "qwen2.5-7b")),
        Case(("--model", "qwen25-32b"), ("unknown model", "qwen2.5-32b")),
        Case((*TINY, "--num-generatoins", "4"), ("--num-generatoins", "num_generations")),
        Case((*TINY, "--lr", "1"), ("called learning_rate here",)),
        Case((*TINY, "--gradient_accumulation_steps", "4"), ("not needed because",)),
        Case((*TINY, "--use_vllm", "true"), ("called engine here",)),
        Case((*TINY, "--load_in_4bit", "true"), ("called quant here",)),
        Case((*TINY, "--actor_rollout_ref.rollout.n", "8"), ("called num_generations here",)),
        Case((*TINY, "--data.train_files", "x"), ("called task.path here",)),
        Case((*TINY, "--kl_coef", "0.04"), ("called beta here",)),
        Case((*TINY, "--loss-type", "sapo"), ("not built", "grpo, dapo, dr_grpo")),
        Case((*TINY, "--top_p", "0.9"), ("refused", "temperature")),
        Case((*TINY, "--temperature", "0"), ("temperature = 0", "above 0")),
        Case((*TINY, "--learning-rate", "fast"), ("learning_rate = fast", "a number")),
        Case((*TINY, "--max-steps"), ("--max-steps needs a value",)),
        Case((*TINY, "--config", str(settings)), ("mine.toml", "nearest: num_generations")),
        Case((*TINY, "--config", str(section)), ("section.toml", "rollout")),
        Case((*TINY, "--config", str(broken)), ("broken.toml", "line 1")),
        Case((*TINY, "--config", str(tmp_path / "none.toml")), ("none.toml",)),
        Case(("--model", str(tmp_path)), ("no config.json", "mine.toml")),
    ]
    check(cases, tmp_path / "run")


def test_the_other_commands(tmp_path):
    """Found without torch, too."""
    cases = {
        ("qerl.evaluate",): "which model? python -m qerl.evaluate RUN takes a run folder",
        ("qerl.evaluate", str(tmp_path)): "is not a run folder",
        ("qerl.evaluate", "--model", "tiny", "--adapter", str(tmp_path)): "holds no adapter",
        ("qerl.sample", "--model", "tiny"): "the prompt is missing",
        ("qerl.sample", "--model", "tiny", "two", "words"): "stands in quotes",
        ("qerl.sample", "--model", "tiny", "word", "--count", "0"): "--count 0",
        ("qerl.quantize",): "--model, --out",
        ("qerl.quantize", "--model", "tiny", "--out", str(ROOT)): "choose another --out",
    }
    for (argv, says), outcome in zip(cases.items(), run_all(list(cases)), strict=True):
        assert outcome["code"] == 2, (argv, outcome)
        assert outcome["stderr"].startswith("qerl: error: "), (argv, outcome)
        assert outcome["stderr"].count("\n") == 1, (argv, outcome)
        assert says in outcome["stderr"], (argv, outcome)
    assert not list(tmp_path.iterdir())


def test_models(tmp_path, tiny_folder):
    def copy(name: str) -> Path:
        return Path(shutil.copytree(tiny_folder, tmp_path / name))

    def edit(folder: Path, **changes) -> Path:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def without_weights(name: str, other: str) -> Path:
        folder = copy(name)
        (folder / "model.safetensors").unlink()
        (folder / other).touch()
        return folder

    shards = {"model.norm.weight": "model-00002-of-00002.safetensors"}
    sharded = without_weights("sharded", "model-00001-of-00002.safetensors")
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    cut = copy("cut")
    os.truncate(cut / "model.safetensors", 100_000)
    gptq = edit(copy("gptq"), quantization_config={"quant_method": "gptq", "bits": 4})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    saved = {"peft_type": "LORA", "r": 64, "lora_alpha": 32, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(saved))
    (adapter / "adapter_model.safetensors").touch()

    def case(folder: Path, *says: str, flags: tuple[str, ...] = ()) -> Case:
        return Case(("--model", str(folder), "--device", "cpu", *SHORT, *SUMS, *flags), says)

    cases = [
        case(sharded, "1 of 1 weight files are missing", "model-00002-of-00002.safetensors"),
        case(cut, "model.safetensors: damaged or cut off"),
        case(without_weights("bin", "pytorch_model.bin"), "only pickled weights", "safetensors"),
        case(without_weights("gguf", "model-q4.gguf"), "model-q4.gguf", "does not read"),
        case(gptq, "already quantized by 'gptq'"),
        case(gptq, "already quantized by 'gptq'", flags=("--quant", "bf16")),
        case(edit(copy("gpt2"), model_type="gpt2"), "'gpt2' is not supported", "qwen2"),
        case(edit(copy("layers"), num_hidden_layers=3), "config.json", "layer_types"),
        case(edit(copy("deep"), num_hidden_layers=3, layer_types=None), "layers.2", "missing"),
        case(edit(copy("wide"), intermediate_size=256), "by config.json"),
        case(tiny_folder, "context of 4096", flags=("--max-prompt-length", "4096")),
        case(tiny_folder, "'query'", "q_proj", flags=("--lora-target-modules", "q_proj,query")),
        case(tiny_folder, "nowhere: no adapter", flags=("--init-adapter", "nowhere")),
        case(tiny_folder, "its r is 64", flags=("--init-adapter", str(adapter))),
        Case((*TINY, "--task", "gms8k"), ("no task 'gms8k'", "gsm8k")),
        Case(
            (*TINY, "--task", "reasoning-gym/chain_sums"), ("no reasoning-gym family", "chain_sum,")
        ),
    ]
    check(cases, tmp_path / "run")


def test_data(tmp_path):
    long = write_lines(tmp_path / "long.jsonl", [{"prompt": "x" * 600, "answer": "1"}] * 4)
    other = write_lines(tmp_path / "other.jsonl", [{"input": "1+1?", "target": "2"}] * 4)
    rows = [{"prompt": f"{i}?", "answer": str(i)} for i in range(4)]
    good = write_lines(tmp_path / "good.jsonl", rows)
    empty = write_lines(tmp_path / "empty.jsonl", [])
    blank = write_lines(tmp_path / "blank.jsonl", [{"prompt": " ", "answer": "1"}])
    (tmp_path / "data.xlsx").touch()

    def case(path: str, *says: str, flags: tuple[str, ...] = ()) -> Case:
        return Case((*TINY, "--task.path", path, *flags), says)

    cases = [
        case(long, "all 4 prompts are longer than max_prompt_length=512", "has 6"),
        case(empty, "empty.jsonl is empty"),
        case(blank, "blank.jsonl: no training problems"),
        case(other, "no column prompt, question, problem", "input, target", "task.prompt_column"),
        case(other, "'querry'", "input, target", flags=("--prompt-column", "querry")),
        case(good, "'gold'", "prompt, answer", flags=("--answer-column", "gold")),
        case(good, "asks for 99 problems", flags=("--train-size", "99")),
        case(good, "no split 'validation'", "train", flags=("--test-split", "validation")),
        case(good, "fewer than prompts_per_step=64", flags=("--prompts-per-step", "64")),
        case(str(tmp_path / "missing.jsonl"), "no file or folder", "missing.jsonl"),
        case(str(tmp_path / "data.xlsx"), "cannot read .xlsx", ".jsonl"),
        Case(TINY, ("no task", "gsm8k", "task.path")),
    ]
    folder = tmp_path / "splits"
    folder.mkdir()
    write_lines(folder / "train.jsonl", [*rows, {"prompt": "x" * 600, "answer": "1"}])
    held_out = [{"prompt": f"{i}?", "answer": str(i)} for i in range(10, 12)]
    write_lines(folder / "test.jsonl", [*held_out, {"prompt": "y" * 600, "answer": "1"}])
    good_run = (*TINY, "--task.path", str(folder), "--eval-size", "4")
    good_run += ("--run-dir", str(tmp_path / "good_run"))
    (accepted,) = check(cases, tmp_path / "run", good_run)
    assert (accepted["code"], accepted["stderr"]) == (0, "")
    assert "1 of 5 problems dropped: prompt longer than 512 tokens" in accepted["stdout"]
    assert "held out: 1 of 3 problems dropped" in accepted["stdout"]


def test_rewards(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # logs of what failed stay there
    (tmp_path / "rewards.py").write_text(
        "def raises(completions):\n    raise KeyError('the_key')\n\n\n"
        "def too_many(completions):\n    return [0.0] * 7\n\n\n"
        "def text(completions):\n    return ['good' for _ in completions]\n\n\n"
        "def nan(completions):\n    return [float('nan') for _ in completions]\n\n\n"
        "def dies(completions):\n    import os\n    os._exit(3)\n\n\n"
        "def wants(completions, difficulty):\n    return [0.0 for _ in completions]\n"
    )
    (tmp_path / "broken.py").write_text("def f(completions:\n")
    (tmp_path / "imports.py").write_text(
        "import no_such_module\n\n\ndef f(completions):\n    pass\n"
    )

    def case(function: str, *says: str) -> Case:
        return Case((*TINY, *SUMS, "--reward-funcs", function), says)

    file = str(tmp_path / "rewards.py")
    cases = [
        case("mth", "no reward 'mth'", "math"),
        case(f"{tmp_path}/none.py:f", "none.py cannot be read"),
        case(f"{file}:raise", "no function 'raise'", "raises"),
        case(file, f"{file}:FUNCTION"),
        case(f"{tmp_path}/broken.py:f", "broken.py, line 1"),
        case(f"{tmp_path}/imports.py:f", "reward f could not be loaded", "no_such_module"),
        case(f"{file}:wants", "wants 'difficulty'", "answer"),
        case(f"{file}:raises", "reward raises does not work", "KeyError: 'the_key'"),
        case(f"{file}:too_many", "reward too_many", "wrong_length", "7 values"),
        case(f"{file}:text", "reward text", "wrong_type", "'good'"),
        case(f"{file}:nan", "reward nan", "not_finite"),
        case(f"{file}:dies", "reward dies", "died", "exit code 3"),
    ]
    check(cases, tmp_path / "run")


def test_run_folders(tmp_path):
    run_dir = tmp_path / "run"
    command = ("qerl.train", *TINY, *SUMS, "--max-steps", "2", "--save-steps", "1")
    command += ("--run-dir", str(run_dir))
    (outcome,) = run_all([command])
    assert (outcome["code"], outcome["stderr"]) == (0, "")
    check_refusals(command, run_dir, tmp_path / "thesis")
    check_cut_checkpoint(command, run_dir)


def check_refusals(command: tuple[str, ...], run_dir: Path, foreign: Path) -> None:
    """Folders that the command must not touch."""
    foreign.mkdir()
    (foreign / "chapter1.tex").write_text("precious")
    before = snapshot(run_dir), snapshot(foreign)
    cases = {
        ("--learning-rate", "0.5", "--seed", "7"): (
            "holds another run",
            "train.learning_rate: 1e-05 -> 0.5",
            "seed: 0 -> 7",
        ),
        ("--resume", "never"): ("already holds a run", "--resume auto"),
        ("--resume", str(foreign / "none")): ("none is not a whole checkpoint",),
        ("--run-dir", str(foreign)): ("holds no run of qerl", "chapter1.tex"),
        ("--run-dir", str(foreign / "chapter1.tex")): ("chapter1.tex is a file",),
        # A file system that always has no space.
        ("--run-dir", "/proc/qerl-run"): ("not enough disk space", "0.00 GiB is free"),
    }
    outcomes = run_all([(*command, *flags) for flags in cases])
    for (flags, says), outcome in zip(cases.items(), outcomes, strict=True):
        assert outcome["code"] == 2, (flags, outcome)
        assert outcome["stderr"].startswith("qerl: error: "), (flags, outcome)
        assert outcome["stderr"].count("\n") == 1, (flags, outcome)
        assert all(part in outcome["stderr"] for part in says), (flags, outcome["stderr"])
    assert (snapshot(run_dir), snapshot(foreign)) == before


def check_cut_checkpoint(command: tuple[str, ...], run_dir: Path) -> None:
    """The last whole checkpoint is taken, and that is said; the result is what it was."""
    last = run_dir / "checkpoints" / "2"
    whole = snapshot(last)
    os.truncate(last / "optimizer.safetensors", 50)
    (outcome,) = run_all([command])
    assert (outcome["code"], outcome["stderr"]) == (0, "")
    assert "checkpoint 2 is damaged (optimizer.safetensors has 50 of" in outcome["stdout"]
    assert "after step 1 of 2" in outcome["stdout"]
    for name in ("optimizer.safetensors", "adapter_model.safetensors"):
        assert (last / name).read_bytes() == whole[name]


def test_cuda_asked_for_and_absent(tmp_path):
    """As its own process, with all that imports print."""
    done = subprocess.run(
        [sys.executable, "-m", "qerl.train", *TINY, *SUMS, "--device", "cuda"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("qerl: error: device=cuda, but torch sees no CUDA GPU")
    assert "--device cpu" in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_breaks_a_run_is_one_line_and_loses_nothing(tmp_path):
    run_dir = tmp_path / "run"
    command = ("qerl.train", *TINY, *SUMS, "--lora-r", "64", "--run-dir", str(run_dir))

    # A file that may not grow stands for a disk that is full when a checkpoint is written.
    full = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert full.returncode == 1, full.stderr
    assert full.stderr.startswith("qerl: error: checkpoint: cannot save checkpoint 1")
    assert "give the same command to continue" in full.stderr
    assert full.stderr.count("\n") == 1
    assert list((run_dir / "checkpoints").iterdir()) == []
    assert not (run_dir / "adapter").exists()

    # Something that is no mistake of the command line: the phase is named, the traceback kept.
    shutil.rmtree(run_dir / "completions")
    (run_dir / "completions").touch()
    (broken,) = run_all([command])
    assert broken["code"] == 1
    assert broken["stderr"].startswith("qerl: error: report: FileExistsError")
    assert str(run_dir / "error.log") in broken["stderr"]
    assert broken["stderr"].count("\n") == 1
    assert "Traceback (most recent call last)" in (run_dir / "error.log").read_text()
