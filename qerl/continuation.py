"""Continuing a run with a command that is not quite the same: what may differ, what is refused, what is said.

Length, saving, evaluation, memory, workers, device and paths may change (`RESUMABLE_FIELDS`). Of paths the contents
are compared (`identity.py`). Everything else shapes what is learnt, so a difference is refused and shown. A longer run
has another learning rate and another noise at the same step, which `schedule_notes` says in numbers.
"""

import json
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

from qerl.algo.noise import noise_at
from qerl.config import Config
from qerl.errors import UserError
from qerl.optim import learning_rate_at

TAKE_OVER = "start afresh with another --run-dir (--init-adapter takes over what a run learnt)"
PACKAGES = ("qerl", "torch", "transformers", "peft", "bitsandbytes", "safetensors")
MAX_FIELDS_SHOWN = 8
RESUMABLE_FIELDS = (
    # how long, and what is saved, shown and evaluated
    "train.max_steps",
    "train.num_epochs",
    "train.max_skipped_steps",
    "log.",
    "resume",
    # limits of time, memory and workers; how the same work is cut, which changes results by rounding only
    "memory_gib",
    "reward.reward_workers",
    "reward.reward_timeout_s",
    "reward.reward_memory_gib",
    "reward.max_failure_share",
    "reward.flat_reward_steps",
    "rollout.max_batch_size",
    "train.max_tokens_per_microbatch",
    "train.gradient_checkpointing",
    # where it runs
    "device",
    # paths: what lies there is compared instead (`identity.py`)
    "run_dir",
    "model",
    "revision",
    "task.path",
    "prompt.chat_template",
    "reward.reward_funcs",
    "model_origin.name",
    "model_origin.origin",
)
"""What may change when a run continues; a trailing dot means the whole section."""


def config_differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (old, new) of the fields that differ and may not; a field that one side lacks is "(absent)"."""
    return {name: pair for name, pair in differences(old, new).items() if not _is_resumable(name)}


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """All that differ. A setting that the old run did not know yet and that is at its default is no difference."""
    defaults = _flatten(Config(model="").model_dump(mode="json"))
    old_fields = _flatten(old)
    new_fields = _flatten(new)
    old_fields = {n: defaults[n] for n in new_fields if n in defaults} | old_fields
    names = sorted(old_fields.keys() | new_fields.keys())
    pairs = {n: (old_fields.get(n, "(absent)"), new_fields.get(n, "(absent)")) for n in names}
    return {n: pair for n, pair in pairs.items() if pair[0] != pair[1]}


def check_same(run_dir: Path, stored: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise UserError with what differs, old and new, unless both (as in config.json) are the same run."""
    found = config_differences(stored["config"], new["config"])
    for part in ("model_origin", "data"):
        found |= config_differences({part: stored[part]}, {part: new[part]})
    if list(stored["rewards"]) != list(new["rewards"]):
        found["rewards"] = (list(stored["rewards"]), list(new["rewards"]))
    if not found:
        return
    shown = list(found.items())[:MAX_FIELDS_SHOWN]
    text = ", ".join(f"{name}: {json.dumps(a)} -> {json.dumps(b)}" for name, (a, b) in shown)
    more = len(found) - len(shown)
    raise UserError(
        f"{run_dir} holds another run; what differs (there -> now): {text}"
        f"{f' and {more} more' if more else ''}. Repeat its settings to continue it, or {TAKE_OVER}"
    )


def change_notes(old: dict[str, Any], new: dict[str, Any], step: int) -> tuple[str, ...]:
    """What may change and changes numbers, for a run of `step` steps. Raises UserError if it is to be shorter."""
    notes = schedule_notes(
        Config.model_validate(new["config"]), step, old["num_steps"], new["num_steps"]
    )
    for name, (before, now) in differences(old["rewards"], new["rewards"]).items():
        notes.append(
            f"the source of reward {name} changed since the run began ({before} -> {now}): "
            "from here on the new one counts"
        )
    if changed := differences(old["machine"], new["machine"]):
        text = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in changed.items())
        notes.append(
            f"computed otherwise than when the run was last started: {text}. It goes on from the same state; "
            "its numbers are not those of the uninterrupted run"
        )
    then = {"qerl's source": old.get("git_revision"), **old["versions"]}
    now = {"qerl's source": git_revision(), **versions()}
    changed = [f"{k} {then.get(k)} -> {v}" for k, v in now.items() if then.get(k) != v]
    if changed:
        notes.append(
            f"versions changed since the run began, so its numbers may too: {', '.join(changed)}"
        )
    return tuple(notes)


def _flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            flat |= _flatten(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _is_resumable(name: str) -> bool:
    return any(
        name == field or (field[-1] == "." and name.startswith(field)) for field in RESUMABLE_FIELDS
    )


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that make the numbers; None for one that is not installed."""
    versions: dict[str, str | None] = {"python": python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


def git_revision() -> str | None:
    """Commit that this package's source is at, "+changes" if edited; None where it is not a git checkout's file."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(folder), *arguments]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    if not git("ls-files", "--error-unmatch", Path(__file__).name):
        return None
    return f"{git('rev-parse', 'HEAD')}{'+changes' if git('status', '--porcelain', '-uno', '.') else ''}"


def schedule_notes(config: Config, step: int, old_num_steps: int, num_steps: int) -> list[str]:
    """What another length means for a run that has done `step` steps. Raises UserError if it has done more."""
    if step > num_steps:
        raise UserError(
            f"this run has done {step} steps, more than the {num_steps} that are asked for; give --max-steps {step} "
            "or more, or --resume CHECKPOINT to go on from an earlier one"
        )
    if num_steps == old_num_steps or step == num_steps:
        return []

    def at(length: int) -> str:
        last = min(step, length - 1)
        noise = noise_at(last, length, config.seed, config.noise)
        return (
            f"learning rate {learning_rate_at(last, length, config.train):.3g}, "
            f"noise sigma {noise.sigma if noise else 0:.3g}"
        )

    return [
        f"the run has {num_steps} steps now and had {old_num_steps}. From step {step + 1} on, the "
        f"{config.train.lr_scheduler_type} schedule and the {config.noise.num_stages} noise stages are those of a run "
        f"of {num_steps} steps: {at(num_steps)} there, instead of {at(old_num_steps)}. The steps already done keep "
        "theirs, so the result differs from a run that had this length from the start"
    ]
