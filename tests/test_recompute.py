"""Recomputation, tiles and host memory change no gradient, and save what they are there to save."""

import weakref

import pytest
import torch
from helpers import load_policy, make_rollout, pack_items, randomize_adapter, save_model
from torch.utils._python_dispatch import TorchDispatchMode

from qerl.kernels import expand
from qerl.model import blocks, frozen_linear, offload
from qerl.model.offload import HostStore, host_bytes

ROLLOUTS = [make_rollout(9, 4, seed=0), make_rollout(3, 7, seed=1), make_rollout(5, 6, seed=2)]


def packed(rollouts=ROLLOUTS):
    (batch,) = pack_items(rollouts, share=False)
    return batch


def prepared(folder, recompute=(), **options):
    """A policy with a random adapter; `recompute`: arguments of enable_recomputation, None for none."""
    if not (folder / "config.json").exists():
        save_model(folder, "qwen2")
    policy = load_policy(folder, **options)
    randomize_adapter(policy)
    if recompute is not None:
        policy.enable_recomputation(*recompute)
    return policy


def gradients(policy, batch=None):
    policy.peft_model.zero_grad()
    policy.logprobs(packed() if batch is None else batch, 1.0)[0].sum().backward()
    return [p.grad.clone() for _, p in policy.trainable_parameters()]


@pytest.fixture
def poisoned():
    """Memory that is handed out without being written holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("recompute", [(), (1,), (2, 1), (2, 2)])
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj"), ("down_proj",)])
def test_recomputation_changes_no_gradient(tmp_path, poisoned, recompute, targets):
    """All layers, some, their inputs in host memory or not: bit for bit."""
    plain = gradients(prepared(tmp_path, None, lora_target_modules=targets))
    again = gradients(prepared(tmp_path, recompute, lora_target_modules=targets))
    assert any(gradient.any() for gradient in plain)
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recompute", [(), (1,), (2, 2)])
@pytest.mark.parametrize("tile", [1, 5, 33, 34])
def test_tiles_change_no_gradient(tmp_path, monkeypatch, poisoned, recompute, tile):
    """Sums over tiles are made in another order, so in fp64; the masters and their gradients are fp32."""
    plain_policy = prepared(tmp_path, None, dtype=torch.float64)
    plain = gradients(plain_policy)
    with torch.no_grad():
        logprobs, _ = plain_policy.logprobs(packed(), 1.0)
    monkeypatch.setattr(blocks, "TILE_TOKENS", tile)
    policy = prepared(tmp_path, recompute, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(policy.logprobs(packed(), 1.0)[0], logprobs, rtol=0, atol=1e-12)
    for one, other in zip(plain, gradients(policy), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


class CountProducts(TorchDispatchMode):
    """FLOPs of all products of two matrices, those that are added in place too."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = args[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tile", [8192, 6])
def test_recomputation_leaves_out_the_last_product(tmp_path, monkeypatch, tile):
    """FLOPs of the layers' wide products: forward, again without down, and dX; tiles add none."""
    monkeypatch.setattr(blocks, "TILE_TOKENS", tile)
    monkeypatch.setattr(offload, "BLOCK_BYTES", 4096)
    policy = prepared(tmp_path, (2, 2))
    batch = packed()
    tokens = len(batch.token_ids)
    with CountProducts() as counter:
        policy.logprobs(batch, 1.0)[0].sum().backward()
    expected = 0
    members = 3, 1, 2, 1
    for index, matrix in enumerate(policy.matrices):
        rows, columns = matrix.packed.shape
        rank = policy.lora.lora_r * members[index % 4]
        times = 1 if index % 4 == 3 else 2  # down is not made again
        wants_x = int(index > 0)  # the embeddings are not trained
        wide, up, down = times + wants_x, times + 2, 2 + 1 + wants_x
        expected += 2 * tokens * (rows * columns * wide + rank * (rows * up + columns * down))
    head = 3 * 2 * len(batch.target_ids) * policy.head.numel()
    assert counter.flops == expected + head


def test_each_layer_runs_twice_and_is_dense_only_while_it_is_used(tmp_path, monkeypatch):
    policy = prepared(tmp_path)
    dense: list[weakref.ref] = []
    most_alive = 0

    def watched(weight, dtype, out=None):
        nonlocal most_alive
        expanded = expand(weight, dtype, out)
        dense.append(weakref.ref(expanded))
        most_alive = max(most_alive, sum(ref() is not None for ref in dense))
        return expanded

    monkeypatch.setattr(frozen_linear, "expand", watched)
    logprobs, _ = policy.logprobs(packed(), 1.0)
    num_matrices = len(policy.matrices)
    assert len(dense) == num_matrices
    assert not any(ref() is not None for ref in dense), "nothing dense outlives forward"
    logprobs.sum().backward()
    assert len(dense) == 2 * num_matrices, "one expansion serves recomputation and backward"
    assert most_alive <= num_matrices // policy.base.config.num_hidden_layers, (
        "the matrices of one layer at most"
    )


def test_host_memory_is_made_once_and_serves_microbatches_of_any_length(tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "BLOCK_BYTES", 1024)
    policy = prepared(tmp_path, (2, 2))
    assert policy.host_store is not None
    plain = prepared(tmp_path, None)
    longer = packed([*ROLLOUTS, make_rollout(40, 30, seed=3)])
    sizes = []
    for batch in (packed(), longer, packed()):
        for one, other in zip(gradients(plain, batch), gradients(policy, batch), strict=True):
            assert torch.equal(one, other)
        sizes.append(policy.host_store.num_bytes)
    assert sizes[1] == sizes[2] == host_bytes(2, len(longer.token_ids) * policy.head.shape[1] * 4)
    assert sizes[0] < sizes[1]


def test_an_abandoned_forward_leaves_the_store_usable(tmp_path):
    policy = prepared(tmp_path, (2, 2))
    first = gradients(policy)
    policy.logprobs(packed(), 1.0)
    for one, other in zip(first, gradients(policy), strict=True):
        assert torch.equal(one, other)


def test_stored_tensors_come_back_as_they_were(monkeypatch):
    monkeypatch.setattr(offload, "BLOCK_BYTES", 64)
    store = HostStore(torch.device("cpu"))
    tensors = [torch.randn(shape).bfloat16() for shape in [(1, 3, 5), (7, 11), (32,), (2, 2)]]
    for _ in range(2):
        store.start()
        assert [store.put(tensor) for tensor in tensors] == [0, 1, 2, 3]
        for place in reversed(range(4)):
            assert torch.equal(store.take(place), tensors[place])
    assert store.num_bytes == sum(host_bytes(1, tensor.nbytes) for tensor in tensors)


@pytest.mark.gpu
def test_stored_tensors_come_back_on_a_gpu_while_it_is_busy():
    device = torch.device("cuda", 0)
    store = HostStore(device)
    work = torch.randn(4096, 4096, device=device)
    for _ in range(3):
        store.start()
        sums = []
        for place in range(8):
            x = torch.full((1, 1000 + place, 4096), float(place), device=device).bfloat16()
            assert store.put(x) == place
            del x
            work = (work @ work).clamp(-1, 1)
            torch.full((1, 2000, 4096), float("nan"), device=device)  # takes memory that is free
        for place in reversed(range(8)):
            x = store.take(place)
            work = (work @ work).clamp(-1, 1)
            sums.append((x == place).all())
            del x
            torch.full((1, 2000, 4096), float("nan"), device=device)
        assert all(bool(value) for value in sums)
