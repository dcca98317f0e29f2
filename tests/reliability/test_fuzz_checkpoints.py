"""Whatever happens to the bytes of a checkpoint: it is found out, the one before is taken, and that is said."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from children import cases
from damage import damages, files_of, fresh_copy
from helpers import load_policy, randomize_adapter, save_model
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from qerl.checkpoint import find_latest_checkpoint, load_checkpoint, save_checkpoint
from qerl.errors import UserError
from qerl.quant.base_weights import BaseWeights, check_source


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def saved(scratch) -> Path:
    """A run folder with checkpoints 10 and 20."""

    def write(folder: Path) -> None:
        save_file({"lora_A": torch.rand(20, 10)}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"r": 2}))

    for step in (10, 20):
        save_checkpoint(
            scratch / "saved",
            step,
            write_adapter=write,
            adapter_bytes=1000,
            optimizer_tensors={"x/state1": torch.rand(50)},
            state={"step": step},
            save_total_limit=2,
        )
    return scratch / "saved"


@cases(0.3)
@given(index=st.integers(0, 10**6), damage=damages())
def test_a_checkpoint_is_whole_or_skipped(saved, scratch, index, damage):
    copy = fresh_copy(saved, scratch / "copy")
    names = files_of(copy / "checkpoints" / "20")
    file = copy / "checkpoints" / "20" / names[index % len(names)]
    before = file.read_bytes()
    damage[1](file)
    unchanged = file.is_file() and file.read_bytes() == before
    info, notes = find_latest_checkpoint(copy)
    assert info is not None
    if unchanged:
        assert (info.step, notes) == (20, ())
    else:
        assert info.step == 10 and len(notes) == 1
        assert "\n" not in notes[0] and "checkpoint 20 is damaged" in notes[0]
    assert load_checkpoint(info).state == {"step": info.step}


@pytest.fixture(scope="module")
def policy_and_adapter(scratch):
    folder = scratch / "model"
    save_model(folder, "qwen2")
    policy = load_policy(folder)
    randomize_adapter(policy)
    (scratch / "adapter").mkdir()
    policy.save_adapter(scratch / "adapter")
    return policy, scratch / "adapter"


@cases(0.15)
@given(index=st.integers(0, 10**6), damage=damages())
def test_an_adapter_loads_or_is_refused(policy_and_adapter, scratch, index, damage):
    """`--init-adapter` and evaluation take folders that no manifest vouches for."""
    policy, adapter = policy_and_adapter
    copy = fresh_copy(adapter, scratch / "adapter-copy")
    names = files_of(copy)
    damage[1](copy / names[index % len(names)])
    try:
        policy.load_adapter(copy)
    except UserError as error:
        assert len(str(error)) < 1000


@cases(0.15)
@given(index=st.integers(0, 10**6), damage=damages())
def test_a_model_loads_or_is_refused(policy_and_adapter, scratch, index, damage):
    copy = fresh_copy(scratch / "model", scratch / "model-copy")
    names = [name for name in files_of(copy) if name.name != "generation_config.json"]
    damage[1](copy / names[index % len(names)])
    try:
        check_source(copy, "nvfp4")
        BaseWeights.load(
            copy,
            format="nvfp4",
            rounding="nearest",
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
    except UserError as error:
        assert len(str(error)) < 2000


@cases(0.15)
@given(data=st.data())
def test_a_model_config_with_other_values_loads_or_is_refused(policy_and_adapter, scratch, data):
    """Values of the wrong type and size, which transformers complains about in many ways."""
    copy = fresh_copy(scratch / "model", scratch / "model-copy")
    config = json.loads((copy / "config.json").read_text())
    names = st.sampled_from(sorted(config))
    values = st.one_of(
        st.none(), st.booleans(), st.integers(-3, 10**9), st.floats(), st.text(max_size=5),
        st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    )  # fmt: skip
    config |= data.draw(st.dictionaries(names, values, min_size=1, max_size=2))
    (copy / "config.json").write_text(json.dumps(config))
    try:
        check_source(copy, "nvfp4")
    except UserError as error:
        assert len(str(error)) < 2000
