"""The policy against plain transformers and PEFT on the same, dequantized, weights."""

import copy

import pytest
import torch
from helpers import (
    MODEL_TYPES,
    load_policy,
    make_rollout,
    pack_items,
    randomize_adapter,
    save_model,
)
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from torch import nn

from qerl.errors import UserError
from qerl.model.frozen_linear import FrozenLinear
from qerl.model.norm import RMSNorm
from qerl.quant.packed import dequantize
from qerl.types import NoiseDraw


def dense_reference(model: nn.Module, policy) -> nn.Module:
    """transformers' model with the policy's dequantized weights and the same norm formula."""
    reference = copy.deepcopy(model)
    for name, module in list(reference.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.data.copy_(dequantize(policy.base.packed(name), torch.float32))
        elif hasattr(module, "variance_epsilon"):
            parent, _, leaf = name.rpartition(".")
            norm = RMSNorm(module.weight.data, module.variance_epsilon)
            setattr(reference.get_submodule(parent), leaf, norm)
    return reference


def sequence_logprobs(model: nn.Module, rollout, temperature: float) -> torch.Tensor:
    ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
    logits = model(input_ids=ids).logits[0].float() / temperature
    first = len(rollout.prompt_ids) - 1
    rows = logits[first:-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(rollout.completion_ids)[:, None])[:, 0]


ROLLOUTS = [make_rollout(p, c, seed=p, vocab=259) for p, c in ((5, 7), (11, 2), (3, 9), (1, 4))]


def packed(rollouts=ROLLOUTS, share=False):
    (batch,) = pack_items(rollouts, share=share)
    return batch


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logprobs_and_adapter_gradients_equal_transformers_and_peft(tmp_path, model_type, tie):
    model = save_model(tmp_path / "model", model_type, tie=tie)
    policy = load_policy(tmp_path / "model")
    randomize_adapter(policy)
    policy.save_adapter(tmp_path / "adapter")
    reference = PeftModel.from_pretrained(
        dense_reference(model, policy), str(tmp_path / "adapter"), is_trainable=True
    )
    for temperature in (1.0, 0.7):
        policy.peft_model.zero_grad()
        reference.zero_grad()
        logprobs, entropy = policy.logprobs(packed(), temperature)
        expected = torch.cat([sequence_logprobs(reference, r, temperature) for r in ROLLOUTS])
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-5)
        assert (entropy > 0).all()
        weights = torch.linspace(-1, 1, len(expected))
        (logprobs @ weights).backward()
        (expected @ weights).backward()
        gradients = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
        ours = policy.trainable_parameters()
        assert len(gradients) == len(ours) == 2 * 7 * 2
        for name, parameter in ours:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("format", ["nvfp4", "nf4", "bf16"])
def test_the_frozen_linear_differentiates_like_the_dense_one_in_float64(tmp_path, format):
    save_model(tmp_path / "model", "qwen2")
    policy = load_policy(tmp_path / "model", format=format)
    packed_weight = policy.base.packed("model.layers.0.self_attn.k_proj")
    x = torch.randn(5, 64, dtype=torch.float64).requires_grad_()
    linear = FrozenLinear(packed_weight, None)
    upstream = torch.randn(5, linear.out_features, dtype=torch.float64)
    (got,) = torch.autograd.grad(linear(x), x, upstream)
    # nf4 is dequantized by bitsandbytes in at most fp32, on both sides alike.
    dense = dequantize(packed_weight, torch.float64)
    torch.testing.assert_close(got, upstream @ dense, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(linear(x), x @ dense.T, rtol=1e-12, atol=1e-12)


def test_the_frozen_linear_saves_nothing_dense(tmp_path):
    save_model(tmp_path / "model", "llama")
    linear = FrozenLinear(
        load_policy(tmp_path / "model").base.packed("model.layers.0.mlp.down_proj"), None
    )
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(torch.randn(3, 128).requires_grad_())
    assert [t for t in saved if t.numel() >= 64 * 128] == []


def test_one_copy_views_share_the_fused_storage(tmp_path):
    save_model(tmp_path / "model", "llama")
    policy = load_policy(tmp_path / "model")
    fused = policy.base.linears["model.layers.0.self_attn.qkv_proj"]
    attention = policy.causal_model.model.layers[0].self_attn
    low, high = fused.codes.data_ptr(), fused.codes.data_ptr() + fused.codes.nbytes
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(attention, name).base_layer.weight
        assert low <= weight.data_ptr() < high
    assert policy.head.data_ptr() == policy.base.tensors["lm_head.weight"].data_ptr()


def test_training_changes_the_adapter_and_never_the_base(tmp_path):
    save_model(tmp_path / "model", "qwen3")
    policy = load_policy(tmp_path / "model")
    before = policy.base.checksum()
    parameters = [p for _, p in policy.trainable_parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    first, _ = policy.logprobs(packed(), 1.0)
    for _ in range(3):
        logprobs, _ = policy.logprobs(packed(), 1.0)
        (-logprobs.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    last, _ = policy.logprobs(packed(), 1.0)
    assert last.mean() > first.mean() + 0.1
    assert policy.base.checksum() == before


def test_packed_sequences_do_not_see_each_other(tmp_path):
    save_model(tmp_path / "model", "llama")
    policy = load_policy(tmp_path / "model")
    randomize_adapter(policy)
    together, _ = policy.logprobs(packed(), 1.0)
    alone = torch.cat([policy.logprobs(packed([r]), 1.0)[0] for r in ROLLOUTS])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_sharing_a_prompt_changes_no_logprob_and_no_gradient_in_float64(tmp_path):
    save_model(tmp_path / "model", "qwen3")
    policy = load_policy(tmp_path / "model", dtype=torch.float64)
    randomize_adapter(policy)
    policy.peft_model.double()
    groups = [
        make_rollout(9, 3 + g % 4, seed=g, vocab=259, prompt_ids=tuple(range(9))) for g in range(5)
    ]
    rollouts = [*groups, *ROLLOUTS]
    results = []
    for share in (False, True):
        batch = packed(rollouts, share)
        policy.peft_model.zero_grad()
        logprobs, _ = policy.logprobs(batch, 0.7)
        (logprobs @ torch.linspace(-1, 1, len(logprobs), dtype=torch.float64)).backward()
        gradients = [p.grad.clone() for _, p in policy.trainable_parameters()]
        results.append((len(batch.token_ids), logprobs.detach(), gradients))
    (plain_tokens, plain, plain_gradients), (shared_tokens, shared, shared_gradients) = results
    assert shared_tokens == plain_tokens - 4 * 9
    torch.testing.assert_close(shared, plain, rtol=0, atol=1e-10)
    for one, other in zip(shared_gradients, plain_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_noise_touches_the_block_norms_and_is_undone_bit_for_bit(tmp_path):
    save_model(tmp_path / "model", "qwen3")
    policy = load_policy(tmp_path / "model")
    weights = {n: p.clone() for n, p in policy.causal_model.named_parameters()}
    clean, _ = policy.logprobs(packed(), 1.0)
    with policy.noise(NoiseDraw(0.01, 0, 3)):
        noisy, _ = policy.logprobs(packed(), 1.0)
        changed = [
            n for n, p in policy.causal_model.named_parameters() if not torch.equal(p, weights[n])
        ]
    assert sorted(changed) == sorted(
        f"model.layers.{layer}.{norm}.weight"
        for layer in range(2)
        for norm in ("input_layernorm", "post_attention_layernorm")
    )
    assert (noisy - clean).abs().max() > 1e-4
    for name, parameter in policy.causal_model.named_parameters():
        assert torch.equal(parameter, weights[name])
    with policy.noise(None):
        again, _ = policy.logprobs(packed(), 1.0)
    assert torch.equal(again, clean)


@pytest.mark.parametrize(("r", "alpha", "rslora"), [(1, 3, False), (8, 8, True), (48, 16, False)])
def test_adapter_scale_matches_peft_for_every_rank_and_alpha(tmp_path, r, alpha, rslora):
    model = save_model(tmp_path / "model", "llama")
    policy = load_policy(tmp_path / "model", lora_r=r, lora_alpha=alpha, use_rslora=rslora)
    randomize_adapter(policy)
    policy.save_adapter(tmp_path / "adapter")
    reference = PeftModel.from_pretrained(dense_reference(model, policy), str(tmp_path / "adapter"))
    got, _ = policy.logprobs(packed(ROLLOUTS[:1]), 1.0)
    expected = sequence_logprobs(reference, ROLLOUTS[0], 1.0)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
    with policy.peft_model.disable_adapter():
        base, _ = policy.logprobs(packed(ROLLOUTS[:1]), 1.0)
    assert (base - got).abs().max() > 1e-3


def test_an_adapter_made_by_peft_is_a_starting_point(tmp_path):
    model = save_model(tmp_path / "model", "llama")
    config = PeftLoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    made = get_peft_model(copy.deepcopy(model), config)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    made.save_pretrained(tmp_path / "adapter")
    policy = load_policy(
        tmp_path / "model",
        lora_target_modules=("q_proj", "v_proj"),
        init_adapter=str(tmp_path / "adapter"),
    )
    ours = dict(policy.trainable_parameters())
    theirs = {n: p for n, p in made.named_parameters() if "lora_" in n}
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert torch.equal(ours[name], parameter)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_r": 8}, "its r is 4, the run's is 8"),
        ({"lora_alpha": 4}, "its lora_alpha is 8"),
        ({"lora_target_modules": ("q_proj",)}, "target modules"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(tmp_path, options, message):
    save_model(tmp_path / "model", "llama")
    load_policy(tmp_path / "model").save_adapter(tmp_path / "adapter")
    with pytest.raises(UserError, match=message):
        load_policy(tmp_path / "model", init_adapter=str(tmp_path / "adapter"), **options)


def test_a_missing_adapter_and_unknown_targets_are_user_errors(tmp_path):
    save_model(tmp_path / "model", "llama")
    with pytest.raises(UserError, match="no adapter there"):
        load_policy(tmp_path / "model", init_adapter=str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="qq_proj"):
        load_policy(tmp_path / "model", lora_target_modules=("qq_proj",))


def test_merging_into_packed_weights_is_refused(tmp_path):
    save_model(tmp_path / "model", "llama")
    with pytest.raises(ValueError, match="packed"):
        load_policy(tmp_path / "model").peft_model.merge_and_unload()


def test_the_adapters_start_depends_on_the_seed_alone(tmp_path):
    save_model(tmp_path / "model", "llama")

    def start(seed, format):
        policy = load_policy(tmp_path / "model", format=format, seed=seed)
        return torch.cat([p.flatten() for _, p in policy.trainable_parameters()])

    state = torch.get_rng_state()
    assert torch.equal(start(0, "nvfp4"), start(0, "bf16"))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(start(0, "nvfp4"), start(1, "nvfp4"))
