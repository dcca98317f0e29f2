"""The parity gate sees each kind of disagreement, says which side to suspect, and leaves everything as it was."""

import dataclasses

import pytest
import torch
from helpers import load_policy, randomize_adapter

from qerl.engine.transformers_engine import TransformersEngine
from qerl.errors import RunError
from qerl.model.frozen_linear import LoraLinear
from qerl.parity import STOP, TEMPERATURES, WARN, Parity, check_parity, parity_prompts

PROMPTS = [tuple(range(5, 11)), (7, 8, 9), (40,), tuple(range(100, 120))]
TOKENS = 12


class Broken(TransformersEngine):
    """An engine that computes another policy than the trainer; `spoil` says in which way."""

    def __init__(self, policy, spoil):
        super().__init__(policy, max_batch_size=16)
        self.spoil = spoil

    def generate(self, requests, sampling):
        if self.spoil == "temperature":
            sampling = dataclasses.replace(sampling, temperature=1.0)
        norms = list(self.policy.noise_modules.values())
        layers = [m for m in self.policy.peft_model.modules() if isinstance(m, LoraLinear)]
        with torch.no_grad():
            for norm in norms:
                norm.weight.mul_(1.3 if self.spoil == "norms" else 1)
            for layer in layers:
                layer.scaling["default"] *= {"scaling": 2, "no adapter": 0}.get(self.spoil, 1)
            try:
                return super().generate(requests, sampling)
            finally:
                for norm in norms:
                    norm.weight.div_(1.3 if self.spoil == "norms" else 1)
                for layer in layers:
                    layer.scaling["default"] = self.policy.lora.lora_alpha / self.policy.lora.lora_r


@pytest.fixture(scope="module")
def policy(tiny_folder):
    policy = load_policy(tiny_folder)
    randomize_adapter(policy, 0.3)
    return policy


def test_an_engine_that_shares_the_policy_agrees_exactly_and_nothing_is_changed(policy):
    before = [parameter.clone() for _, parameter in policy.trainable_parameters()]
    state = torch.get_rng_state()
    parity, warning = check_parity(policy, TransformersEngine(policy, 16), PROMPTS, TOKENS)
    assert warning is None
    assert set(parity.ratios) == {(filled, t) for filled in (False, True) for t in TEMPERATURES}
    assert parity.worst < 1 + 1e-5
    after = [parameter for _, parameter in policy.trainable_parameters()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("spoil", "suspect"),
    [
        ("norms", "already without an adapter"),
        ("scaling", "only with an adapter: suspect its scaling"),
        ("no adapter", "only with an adapter"),
        ("temperature", "only at a temperature other than 1"),
    ],
)
def test_a_broken_engine_is_stopped_with_the_side_to_suspect(policy, spoil, suspect):
    before = [parameter.clone() for _, parameter in policy.trainable_parameters()]
    with pytest.raises(RunError, match=f"^parity: .*above {STOP}, {suspect}") as caught:
        check_parity(policy, Broken(policy, spoil), PROMPTS, TOKENS)
    assert caught.value.phase == "parity"
    after = [parameter for _, parameter in policy.trainable_parameters()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_a_trainer_that_ignores_its_adapter_is_found(policy, monkeypatch):
    monkeypatch.setattr(LoraLinear, "adapter", lambda self, dtype: None)
    with pytest.raises(RunError, match="it is not applied"):
        check_parity(policy, TransformersEngine(policy, 16), PROMPTS, TOKENS)


def test_between_the_limits_it_warns(policy, monkeypatch):
    monkeypatch.setattr("qerl.parity.WARN", 0.5)
    parity, warning = check_parity(policy, TransformersEngine(policy, 16), PROMPTS, TOKENS)
    assert warning is not None and "already without an adapter" in warning
    assert WARN < STOP and parity.line().count("T=") == 4


def test_what_is_suspected_depends_on_which_cases_are_bad():
    def suspect(*bad):
        cases = {(filled, t): 1.0 for filled in (False, True) for t in TEMPERATURES}
        return Parity(cases | dict.fromkeys(bad, 1.2)).suspect(STOP)

    assert "base" in suspect((False, 1.0), (True, 1.0), (False, 0.7), (True, 0.7))
    assert "scaling" in suspect((True, 1.0), (True, 0.7))
    assert "temperature" in suspect((False, 0.7), (True, 0.7))


def test_the_shortest_prompts_are_taken():
    assert parity_prompts([(1,) * n for n in (9, 3, 3, 5, 4, 8)]) == [
        (1,) * n for n in (3, 4, 5, 8)
    ]
