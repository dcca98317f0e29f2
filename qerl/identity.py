"""What a run is, apart from its settings: fingerprints of the base's bytes, the problems, the reward functions.

A path says little: a file can be moved, or edited where it is. A run goes on only over the same base and the same
problems, wherever they lie now.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qerl.model.source import ModelSource
from qerl.quant.checkpoint_reader import find_weight_files
from qerl.tasks.calls import BuiltinFunction, FileFunction, PickledFunction, RewardSpec
from qerl.tasks.prompts import EncodedProblems

NUM_SAMPLES = 16
SAMPLE_BYTES = 1 << 16
DIGITS = 16
"""Hex digits kept of a sha256: for telling versions of one's own files apart, not against forgery."""


def identity_of(
    source: ModelSource, problems: EncodedProblems, rewards: Sequence[RewardSpec]
) -> dict[str, Any]:
    """JSON for config.json: `model_origin`, `data` and `rewards`."""
    return {
        "model_origin": {
            "name": source.name,
            "origin": source.origin,
            "fingerprint": model_fingerprint(source.folder),
        },
        "data": {"train": data_fingerprint(problems), "num_problems": len(problems.problems)},
        "rewards": {spec.name: reward_fingerprint(spec) for spec in rewards},
    }


def model_fingerprint(folder: Path) -> str:
    """Of the weight files: their sizes, and 16 samples of 64 KiB spread over each. Reads megabytes, not gigabytes."""
    digest = hashlib.sha256()
    for path in find_weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for index in range(NUM_SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * index // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:DIGITS]


def data_fingerprint(encoded: EncodedProblems) -> str:
    """Of every training problem in order: its tokens, which settings of the prompt shape too, answer and columns."""
    digest = hashlib.sha256()
    for problem, ids in zip(encoded.problems, encoded.prompt_ids, strict=True):
        columns = json.dumps(problem.columns, sort_keys=True, default=str)
        digest.update(f"{problem.id} {ids} {problem.answer} {columns}\n".encode())
    return digest.hexdigest()[:DIGITS]


def reward_fingerprint(spec: RewardSpec) -> str:
    """Of a function's source; a built-in one is its name."""
    match spec.source:
        case BuiltinFunction(name):
            return name
        case FileFunction(text=text, function=function):
            return f"{function} {_short(text.encode())}"
        case PickledFunction():  # the bytes name the session, so they differ each time
            return "defined in a session"


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGITS]
