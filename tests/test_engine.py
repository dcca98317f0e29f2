"""The transformers engine: what it samples, and that its log-probabilities are the trainer's."""

import itertools

import pytest
import torch
from helpers import MODEL_TYPES, load_policy, pack_items, randomize_adapter, save_model
from peft import PeftModel
from transformers import AutoModelForCausalLM

from qerl.engine.transformers_engine import TransformersEngine, sample_tokens
from qerl.types import GenerationRequest, NoiseDraw, Sampling

REQUESTS = [
    GenerationRequest("a", tuple(range(40, 52)), (1, 2, 3)),
    GenerationRequest("b", tuple(range(70, 75)), (4, 5)),
    GenerationRequest("c", (9,), (6, 7, 8, 9)),
]
SAMPLING = Sampling(temperature=1.0, max_completion_length=12, eos_token_ids=(258, 17))


def flat(groups):
    return list(itertools.chain.from_iterable(groups))


def trainer_logprobs(policy, rollouts, temperature):
    (batch,) = pack_items(rollouts, share=True)
    with torch.no_grad():
        logprobs, _ = policy.logprobs(batch, temperature)
    return logprobs, batch.rollout_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_adapter", [False, True])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_logprob_is_the_trainers(tmp_path, model_type, with_adapter, temperature):
    save_model(tmp_path / "m", model_type)
    policy = load_policy(tmp_path / "m")
    if with_adapter:
        randomize_adapter(policy, scale=0.3)
    engine = TransformersEngine(policy, max_batch_size=4)
    sampling = Sampling(temperature, 12, (258, 17))
    rollouts = flat(engine.generate(REQUESTS, sampling))
    trainer, recorded = trainer_logprobs(policy, rollouts, temperature)
    torch.testing.assert_close(trainer, recorded, rtol=0, atol=1e-4)


@pytest.mark.parametrize("format", ["nvfp4", "nf4", "bf16"])
def test_every_format_agrees_with_its_trainer(tmp_path, format):
    save_model(tmp_path / "m", "qwen2")
    policy = load_policy(tmp_path / "m", format=format)
    randomize_adapter(policy)
    rollouts = flat(TransformersEngine(policy, 64).generate(REQUESTS, SAMPLING))
    trainer, recorded = trainer_logprobs(policy, rollouts, 1.0)
    torch.testing.assert_close(trainer, recorded, rtol=0, atol=1e-4)


def test_noise_is_in_the_recorded_logprobs(tmp_path):
    save_model(tmp_path / "m", "qwen3")
    policy = load_policy(tmp_path / "m")
    engine = TransformersEngine(policy, 64)
    draw = NoiseDraw(sigma=0.05, seed=0, step=4)
    engine.sync(4, draw)
    rollouts = flat(engine.generate(REQUESTS, SAMPLING))
    clean, recorded = trainer_logprobs(policy, rollouts, 1.0)
    with policy.noise(draw):
        noisy, _ = trainer_logprobs(policy, rollouts, 1.0)
    torch.testing.assert_close(noisy, recorded, rtol=0, atol=1e-4)
    assert (clean - recorded).abs().max() > 1e-3
    assert {r.version for r in rollouts} == {4}
    engine.sync(5, None)
    rollouts = flat(engine.generate(REQUESTS, SAMPLING))
    clean, recorded = trainer_logprobs(policy, rollouts, 1.0)
    torch.testing.assert_close(clean, recorded, rtol=0, atol=1e-4)


def test_a_sample_depends_on_its_seed_and_not_on_the_batch(tmp_path):
    save_model(tmp_path / "m", "llama")
    policy = load_policy(tmp_path / "m")
    together = TransformersEngine(policy, 64).generate(REQUESTS, SAMPLING)
    small = TransformersEngine(policy, 2).generate(REQUESTS[::-1], SAMPLING)[::-1]
    for one, other in zip(flat(together), flat(small), strict=True):
        assert one.completion_ids == other.completion_ids
        assert (one.problem_id, one.sample_index) == (other.problem_id, other.sample_index)
    texts = {r.completion_ids for r in flat(together)}
    assert len(texts) > len(REQUESTS)


def test_ends_come_from_eos_ids_or_the_length(tmp_path):
    save_model(tmp_path / "m", "llama")
    engine = TransformersEngine(load_policy(tmp_path / "m"), 64)
    eos = tuple(range(0, 259, 4))
    requests = [GenerationRequest("a", (5, 6, 7), tuple(range(40)))]
    rollouts = flat(engine.generate(requests, Sampling(1.0, 6, eos)))
    reasons = {r.finish_reason for r in rollouts}
    assert reasons == {"stop", "length"}
    for rollout in rollouts:
        assert not set(rollout.completion_ids[:-1]) & set(eos)
        assert (rollout.completion_ids[-1] in eos) == (rollout.finish_reason == "stop")
        if rollout.finish_reason == "length":
            assert len(rollout.completion_ids) == 6
        assert len(rollout.logprobs) == len(rollout.loss_mask) == len(rollout.completion_ids)


def test_greedy_equals_transformers_generate(tmp_path):
    save_model(tmp_path / "m", "qwen2")
    policy = load_policy(tmp_path / "m", format="bf16")
    randomize_adapter(policy)
    rollouts = flat(TransformersEngine(policy, 64).generate(REQUESTS, Sampling(0.0, 10, (258,))))
    policy.save_adapter(tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    reference = PeftModel.from_pretrained(model, str(tmp_path / "adapter"))
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt_ids])
        out = reference.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=10,
            do_sample=False,
            eos_token_id=258,
            pad_token_id=256,
        )
        assert tuple(out[0, ids.shape[1] :].tolist()) == rollout.completion_ids


def test_tokens_are_drawn_from_the_distribution_that_is_reported():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 8, generator=generator) * 2
    draws = 40_000
    uniforms = torch.rand(draws, generator=generator)
    tokens, logprobs = sample_tokens(logits.expand(draws, 8), uniforms, Sampling(0.7, 1, ()))
    expected = (logits[0] / 0.7).softmax(-1)
    counts = torch.bincount(tokens, minlength=8) / draws
    assert (counts - expected).abs().max() < 5 * (0.25 / draws) ** 0.5
    torch.testing.assert_close(logprobs.exp(), expected[tokens])


@pytest.mark.parametrize("option", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.6}])
def test_filtered_tokens_never_appear_even_at_the_ends(option):
    logits = torch.tensor([[3.0, 2.0, -1.0, -9.0]])
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-24])
    tokens, logprobs = sample_tokens(logits.expand(3, 4), uniforms, Sampling(1.0, 1, (), **option))
    assert set(tokens.tolist()) <= {0, 1}
    assert torch.isfinite(logprobs).all()


def test_a_uniform_of_almost_one_never_draws_an_impossible_token():
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, :700] = 0.0
    tokens, _ = sample_tokens(logits, torch.tensor([1 - 2**-24]), Sampling(1.0, 1, ()))
    assert tokens.item() < 700
