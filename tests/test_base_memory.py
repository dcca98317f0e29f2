"""How much anonymous memory loading a base takes, in a process of its own, on a checkpoint of 1 GB."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import save_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

ALLOWANCE_MIB = 64
"""Lookup tables, fp32 parts of a few rows, the allocator's slack, threads."""

MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
import transformers
from qerl.quant.base_weights import BaseWeights

def anonymous():
    line = next(l for l in open("/proc/self/status") if l.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
folder, warm, format, cache = sys.argv[1:]
options = {"format": format, "rounding": "nearest", "dtype": torch.bfloat16, "device": "cpu"}
BaseWeights.load(Path(warm), **options)  # imports and tables that every load shares
baseline, peak, done = anonymous(), 0, False

def sample():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)

thread = threading.Thread(target=sample)
thread.start()
base = BaseWeights.load(Path(folder), cache_dir=Path(cache) if cache else None, **options)
done = True
thread.join()
print(peak - baseline, base.nbytes)
"""


def write_large_model(folder: Path) -> int:
    """A llama of at least 1 GB in bf16, one shard a layer (all layers alike); returns the largest fused group's bytes."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=9,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=4096,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    layer = {
        "self_attn.q_proj": random(2048, 2048),
        "self_attn.k_proj": random(512, 2048),
        "self_attn.v_proj": random(512, 2048),
        "self_attn.o_proj": random(2048, 2048),
        "mlp.gate_proj": random(8192, 2048),
        "mlp.up_proj": random(8192, 2048),
        "mlp.down_proj": random(2048, 8192),
        "input_layernorm": random(2048),
        "post_attention_layernorm": random(2048),
    }
    shards = [
        {f"model.layers.{i}.{name}.weight": tensor for name, tensor in layer.items()}
        for i in range(9)
    ]
    shards.append(
        {
            "model.embed_tokens.weight": random(4096, 2048),
            "lm_head.weight": random(4096, 2048),
            "model.norm.weight": random(2048),
        }
    )
    weight_map = {}
    for number, tensors in enumerate(shards):
        save_file(tensors, folder / f"shard-{number}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, f"shard-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return 2 * 8192 * 2048 * 2


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Folder of the model, and bytes of its largest fused group."""
    folder = tmp_path_factory.mktemp("large")
    return folder, write_large_model(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("format", "cached"), [("nvfp4", False), ("nvfp4", True), ("nf4", False)])
def test_loading_takes_the_packed_model_and_one_group_of_anonymous_memory(
    large_model: tuple[Path, int], tmp_path: Path, format: str, cached: bool
) -> None:
    folder, largest_group = large_model
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size >= 1_000_000_000
    warm = save_model(tmp_path / "warm")
    arguments = [str(folder), str(warm), format, str(tmp_path / "cache") if cached else ""]
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
    ).stdout
    peak, base_nbytes = (int(number) for number in output.split())
    assert base_nbytes < 0.35 * size
    allowed = base_nbytes + largest_group + ALLOWANCE_MIB * 2**20
    print(f"peak {peak / 2**20:.0f} MiB, allowed {allowed / 2**20:.0f} MiB")
    assert base_nbytes * 0.9 < peak <= allowed
