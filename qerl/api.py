"""qerl in Python: the same runs, folders, checks and messages as on the command line. Imports no torch until it must.

    run = qerl.train(model="quickstart", max_steps=24)          # returns when the run is over
    run = qerl.train(model="quickstart", dataset=rows, reward_funcs=[f], noise={"sigma_start": 1e-3})
    run.metrics                                                 # a DataFrame, a row a step
    run.sample("Calculate 7 + 5.", count=4)                     # run.sample(..., base=True) asks without the adapter
    run.evaluate(k=4)
    run.close()                                                 # gives the memory back; run.metrics stays

Settings are named as on the command line, and a call becomes one: `qerl.train.main` runs it. Two things are different.
Each call without `run_dir` begins a new run, in the first free folder of runs/NAME, runs/NAME-2, ...; with `run_dir` the
same call again continues, as a command does. And rows and functions of the session may stand for files: rows are
written to the cache under a hash of their content; functions go to the reward workers by value, and the run's settings
name them with a hash of their source.
"""

import gc
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.cache import build_once, cache_root
from qerl.comparison.arms import words_of
from qerl.config import Config
from qerl.errors import UserError
from qerl.settings.layers import Layer, Setting, build_config, layer_of

if TYPE_CHECKING:
    import datasets
    import pandas as pd
    from matplotlib.figure import Figure

    from qerl.build import Inference
    from qerl.comparison.result import ComparisonResult

Rows = Sequence[Mapping[str, Any]]
Reward = str | Callable[..., Any]


def train(
    model: str,
    dataset: "str | Path | Rows | Mapping[str, Rows] | datasets.Dataset | datasets.DatasetDict | None" = None,
    reward_funcs: Reward | Sequence[Reward] = (),
    *,
    run_dir: str | Path | None = None,
    config: str | Path | None = None,
    **settings: Any,
) -> "TrainedRun":
    """Train an adapter and return the run. Prints what `python -m qerl.train` prints.

    Args:
        model: preset, Hugging Face id, folder, or tiny.
        dataset: a task (gsm8k, reasoning-gym/FAMILY), a file, a folder, a hub id, rows (a list of dictionaries or a
            `datasets.Dataset`), or rows by split. Default: the preset's task.
        reward_funcs: functions with TRL's or verl's signature, FILE.py:FUNCTION, or built-in names.
        run_dir: the run's folder; the same call again continues there. Default: a new folder.
        config: a settings file below these settings.
        settings: any setting by its name, `max_steps=24`, or by section, `noise={"sigma_start": 1e-3}`.

    Raises:
        UserError: bad input, before anything is written. RunError: the run broke; RUN/error.log has the traceback.
    """
    from qerl.train import main

    layer = _layer("qerl.train", {"model": model, **settings})
    layer |= _dataset_layer(dataset) | _reward_layer(reward_funcs)
    folder = Path(run_dir) if run_dir is not None else _free_folder(layer, config)
    layer["run_dir"] = Setting(str(folder), "run_dir")
    main([*words_of(layer), *([] if config is None else ["--config", str(config)])])
    gc.collect()
    return TrainedRun(folder)


def load_run(run_dir: str | Path) -> "TrainedRun":
    """A run that was trained before, here or by a command. Raises UserError if the folder holds none."""
    return TrainedRun(Path(run_dir))


def compare(
    arms: Sequence[str] | str | None = None,
    seeds: Sequence[int] | None = None,
    *,
    baseline: str | None = None,
    target_accuracy: Sequence[float] | None = None,
    minutes: float | None = None,
    dataset: "str | Path | Rows | Mapping[str, Rows] | datasets.Dataset | datasets.DatasetDict | None" = None,
    config: str | Path | None = None,
    **settings: Any,
) -> "ComparisonResult":
    """Train arms x seeds as `python -m qerl.compare` does, each in a process of its own; the same call again continues.

    Rewards are built-in names or FILE.py:FUNCTION: a function of this session does not reach another process. Raises
    UserError for bad input; runs that fail are in the result.
    """
    from qerl.compare import finish
    from qerl.comparison.arms import make_comparison
    from qerl.comparison.runner import Runner

    layer = _layer("qerl.compare", settings) | _dataset_layer(dataset)
    options = {"arms": arms, "seeds": seeds, "baseline": baseline}
    comparison = make_comparison(
        layer,
        None if config is None else str(config),
        options | {"target_accuracy": target_accuracy},
    )
    runner = Runner(comparison, minutes)
    runner.run_all()
    finish(comparison, runner)
    return load_comparison(comparison.folder)


def load_comparison(folder: str | Path) -> "ComparisonResult":
    """A comparison that was run before. Raises UserError if the folder holds none."""
    from qerl.comparison.result import ComparisonResult

    return ComparisonResult(Path(folder))


class TrainedRun:
    """A finished or stopped run. State: the folder, and, from the first question on, the model that answers.

    A context manager: `with qerl.train(...) as run` closes it at the end.
    """

    def __init__(self, run_dir: Path):
        from qerl.run_folder import read_run_config

        self.run_dir = run_dir
        self.config: dict[str, Any] = read_run_config(run_dir)["config"]
        self._inference: Inference | None = None

    @property
    def metrics(self) -> "pd.DataFrame":
        """metrics.jsonl, a row a step: evaluations stand in the row of their step. Index: step."""
        import pandas as pd

        from qerl.metrics import read_metrics

        rows: dict[int, dict[str, Any]] = {}
        for line in read_metrics(self.run_dir):
            rows.setdefault(line["step"], {}).update(line)
        return pd.DataFrame(list(rows.values())).set_index("step").sort_index()

    def completions(self, step: int, kind: str | None = None) -> "pd.DataFrame":
        """What was sampled in a step: prompt, completion, reward terms, advantage. `kind` is train or eval."""
        import pandas as pd

        from qerl.reporting.runs import completion_rows, read_record

        rows = completion_rows(read_record(self.run_dir), step, kind)
        if not rows:
            raise UserError(f"{self.run_dir} has no {kind or ''} completions of step {step}")
        return pd.DataFrame(rows)

    def plot(self) -> "Figure":
        """Reward, held-out accuracy, entropy and noise over the steps."""
        from qerl.report_plot import learning_curve

        return learning_curve(self.run_dir)

    def report(self) -> Path:
        """Write report.html: every metric, and a browser of the completions."""
        from qerl.report import write_report

        return write_report([self.run_dir])

    def sample(
        self,
        prompt: str,
        count: int = 1,
        *,
        base: bool = False,
        greedy: bool = False,
        seed: int = 0,
    ) -> list[str]:
        """Answers to a prompt through the run's own template and engine; `base` asks without the adapter.

        The first call loads the model, which then stays until `close`.
        """
        from qerl.rollout import generate
        from qerl.tasks.prompts import encode_problems
        from qerl.types import Problem

        if count < 1:
            raise UserError(f"count={count}: give a whole number of answers, 1 or more")
        inference, config = self._open(), self._config()
        encoded = encode_problems(
            [Problem("prompt", prompt, None)],
            inference.tokenizer,
            config.prompt,
            config.prompt.system_prompt,
            config.rollout.max_prompt_length,
        )
        sampling = replace(inference.sampling, temperature=0.0) if greedy else inference.sampling
        with inference.policy.reference() if base else nullcontext():
            inference.engine.sync(0, None)
            address = ("sample", seed)
            batch = generate(
                inference.engine, inference.tokenizer, encoded, [0], sampling, count, address
            )
        return batch.texts[0]

    def evaluate(self, k: int = 4, **settings: Any) -> dict[str, Any]:
        """The adapter beside its base on held-out problems, as `python -m qerl.evaluate` does; returns its summary.json.

        `settings` override the run's, for example `eval_size=500`. Raises UserError if the adapter changes nothing.
        """
        from qerl.evaluate import main

        self.close()  # one model at a time
        parent = self.run_dir / "evaluations"
        number = 1
        while (parent / str(number)).exists():
            number += 1
        out = parent / str(number)
        words = words_of(_layer("evaluate", settings))
        main([str(self.run_dir), f"--k={k}", f"--out={out}", *words])
        gc.collect()
        return json.loads((out / "summary.json").read_text(encoding="utf-8"))

    def close(self) -> None:
        """Give the model's memory back. The folder stays, and so does everything that is read from it."""
        if self._inference is not None:
            self._inference.engine.close()
            self._inference = None
        gc.collect()
        _empty_cuda_cache()

    def __enter__(self) -> "TrainedRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TrainedRun({str(self.run_dir)!r}, {len(self.metrics)} steps with metrics)"

    def _config(self) -> Config:
        return build_config({}, None, self.config)[0]

    def _open(self) -> "Inference":
        if self._inference is None:
            from qerl.build import load_tokenizer, open_inference
            from qerl.model.source import resolve_model

            config = self._config()
            source = resolve_model(config.model, config.revision)
            tokenizer = load_tokenizer(source, config.trust_remote_code)
            inference = open_inference(config, source, tokenizer)
            inference.policy.load_adapter(self.run_dir / "adapter")
            self._inference = inference
        return self._inference


def _layer(caller: str, settings: Mapping[str, Any]) -> Layer:
    """Keyword arguments as settings; None leaves a setting as it is."""
    given = {key: value for key, value in settings.items() if value is not None}
    layer = layer_of(given, caller)
    return {
        path: replace(setting, value=str(setting.value))
        if isinstance(setting.value, Path)
        else setting
        for path, setting in layer.items()
    }


def _dataset_layer(dataset: Any) -> Layer:
    """Task name or path of what was given; rows are written to the cache first."""
    if dataset is None:
        return {}
    from qerl.tasks import TASKS

    text = str(dataset) if isinstance(dataset, str | Path) else _write_rows(dataset)
    is_task = isinstance(dataset, str) and text.partition("/")[0] in TASKS
    if is_task and not Path(text).exists():
        return {"task.name": Setting(text, "dataset")}
    return {
        "task.name": Setting("dataset", "dataset"),
        "task.path": Setting(text, "dataset"),
    }


def _write_rows(dataset: Any) -> str:
    """Rows as a .jsonl file, or a folder with one for each split, named by a hash of the content."""
    splits = dict(dataset) if isinstance(dataset, Mapping) else {"train": dataset}
    texts = {str(name): _json_lines(rows, str(name)) for name, rows in splits.items()}
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:16]

    def write(folder: Path) -> None:
        for name, text in texts.items():
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")

    return str(build_once(cache_root() / "rows" / digest, write))


def _json_lines(rows: Any, split: str) -> str:
    rows = list(rows)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(
            f"dataset ({split}): give rows as dictionaries, at least one, or a file, a hub id, a task"
        )
    try:
        return "".join(json.dumps(dict(row)) + "\n" for row in rows)
    except (TypeError, ValueError) as error:
        raise UserError(f"dataset ({split}): rows must be plain JSON values: {error}") from error


def _reward_layer(reward_funcs: Reward | Sequence[Reward]) -> Layer:
    """Names of the functions; those of this session are entered where the run looks them up."""
    given = (
        [reward_funcs] if isinstance(reward_funcs, str) or callable(reward_funcs) else reward_funcs
    )
    if not given:
        return {}
    from qerl.tasks.rewards import SESSION_FUNCTIONS, SESSION_PREFIX

    names = []
    for function in given:
        if isinstance(function, str):
            names.append(function)
            continue
        if not callable(function):
            raise UserError(f"reward_funcs: {function!r:.60} is neither a function nor a name")
        label = getattr(function, "__name__", type(function).__name__)
        name = f"{SESSION_PREFIX}{label}@{_fingerprint(function)}"
        SESSION_FUNCTIONS[name] = function
        names.append(name)
    return {"reward.reward_funcs": Setting(names, "reward_funcs")}


def _fingerprint(function: Callable[..., Any]) -> str:
    """Eight hex digits of a function's source, so that config.json says which function it was."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):  # no source: typed at a prompt, or an object
        source = repr(function)
    return hashlib.sha256(source.encode()).hexdigest()[:8]


def _free_folder(layer: Layer, config: str | Path | None) -> Path:
    from qerl.build import run_dir_of

    first = run_dir_of(build_config(dict(layer), None if config is None else str(config))[0])
    folder, number = first, 1
    while folder.exists():
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    return folder


def _empty_cuda_cache() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
