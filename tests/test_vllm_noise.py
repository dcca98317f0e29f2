"""Adaptive quantization noise in a real vLLM on a CPU, and the parity gate with it.

`make test-vllm` runs this file where vLLM is installed.
"""

import pytest
import torch
from helpers import randomize_adapter
from test_training import arguments, prompts  # noqa: F401
from test_vllm_engine import flat, largest_difference, make_policy, open_engine  # noqa: F401

from qerl.engine import vllm_engine
from qerl.engine.vllm_setup import installed_version
from qerl.errors import RunError
from qerl.metrics import read_metrics
from qerl.parity import check_parity
from qerl.train import main
from qerl.types import GenerationRequest, NoiseDraw, Sampling

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        installed_version() is None, reason="vLLM is not installed here: make test-vllm"
    ),
]

STEPS = 80
"""Decode steps of a completion: longer than what one draw has to last"""
REQUESTS = [
    GenerationRequest("a", tuple(range(40, 52)), (1, 2)),
    GenerationRequest("b", (9,), (3,)),
]
FIRST, SECOND = (NoiseDraw(sigma=0.05, seed=0, step=step) for step in (4, 5))


def norms_of(engine):
    return {name: weight.detach().clone() for name, weight in engine.adoption.norms.items()}


def test_one_draw_lasts_a_version_and_nothing_of_it_is_left(tmp_path, open_engine):  # noqa: F811
    policy = make_policy(tmp_path / "m")
    randomize_adapter(policy, 0.3)
    engine = open_engine(policy)
    sampling = Sampling(1.0, STEPS, ())
    clean = norms_of(engine)
    assert len(clean) == len(policy.noise_modules) == 4
    drawn = {}
    for version, draw in enumerate((FIRST, SECOND, FIRST, None)):
        engine.sync(version, draw)
        before = norms_of(engine)
        rollouts = flat(engine.generate(REQUESTS, sampling))
        assert {len(rollout.completion_ids) for rollout in rollouts} == {STEPS}
        assert {rollout.version for rollout in rollouts} == {version}
        after = norms_of(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)
        # Every one of the 80 tokens was drawn under this noise, and under no other.
        with policy.noise(draw):
            assert largest_difference(policy, rollouts) < 1e-4
        for other in {FIRST, SECOND, None} - {draw}:
            with policy.noise(other):
                assert largest_difference(policy, rollouts) > 1e-3
        drawn[version] = (after, [rollout.completion_ids for rollout in rollouts])
    assert all(not torch.equal(drawn[0][0][name], drawn[1][0][name]) for name in clean)
    assert all(torch.equal(drawn[0][0][name], drawn[2][0][name]) for name in clean)
    assert drawn[0][1] == drawn[2][1]
    assert all(torch.equal(drawn[3][0][name], clean[name]) for name in clean)
    assert all(torch.equal(clean[name], policy.base.tensors[f"{name}.weight"]) for name in clean)


def test_noise_raises_the_entropy_of_what_is_sampled(tmp_path, open_engine):  # noqa: F811
    """Of a random model, whose logits the noise only perturbs: the distribution itself changes, reproducibly."""
    policy = make_policy(tmp_path / "m")
    engine = open_engine(policy)
    surprises = []
    for sigma in (0.01, 0.1, 0.5):
        engine.sync(1, NoiseDraw(sigma=sigma, seed=0, step=1))
        rollouts = flat(engine.generate(REQUESTS, Sampling(1.0, 32, ())))
        surprises.append(-sum(sum(r.logprobs) for r in rollouts) / (32 * len(rollouts)))
    assert len({round(value, 6) for value in surprises}) == 3


def test_the_gate_passes_a_whole_engine_and_finds_a_broken_one(
    tmp_path,
    open_engine,  # noqa: F811
    monkeypatch,
):
    policy = make_policy(tmp_path / "m")
    randomize_adapter(policy, 0.3)
    before = [parameter.clone() for _, parameter in policy.trainable_parameters()]
    engine = open_engine(policy)
    sampled = [(5, 6, 7), tuple(range(60, 80))]
    parity, warning = check_parity(policy, engine, sampled, 24)
    assert warning is None and parity.worst < 1 + 1e-4

    update = vllm_engine.update

    def doubled(buffers):
        buffers = list(buffers)
        update(buffers)
        for found in buffers:
            found.b.mul_(2)

    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine, "update", doubled)
        with pytest.raises(RunError, match="only with an adapter: suspect its scaling"):
            check_parity(policy, engine, sampled, 24)
        # Never copied again: the engine keeps the one of the check before.
        patch.setattr(vllm_engine, "update", lambda buffers: None)
        with pytest.raises(RunError, match=r"already without an adapter: .* or an old adapter"):
            check_parity(policy, engine, sampled, 24)
    assert check_parity(policy, engine, sampled, 24)[1] is None
    after = [parameter for _, parameter in policy.trainable_parameters()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_an_engine_that_dies_in_the_middle_leaves_a_whole_checkpoint(
    tmp_path,
    prompts,  # noqa: F811
    monkeypatch,
    capfd,
):
    run = tmp_path / "run"
    words = arguments(run, prompts, engine="vllm", max_steps=4, save_steps=1)
    generate = vllm_engine.VllmEngine.generate
    calls = []

    def dies(self, requests, sampling):
        calls.append(1)
        if len(calls) == 7:  # four of the gate, two steps, and then
            self.llm.llm_engine.engine_core.engine_core.model_executor = None
        return generate(self, requests, sampling)

    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine.VllmEngine, "generate", dies)
        with pytest.raises(RunError, match=r"^rollout: vLLM .* failed: .*error\.log"):
            main(words)
    assert [line["step"] for line in read_metrics(run)] == [1, 2]
    assert main(words) == 0
    assert "continuing" in capfd.readouterr().out
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3, 4]
