"""Random models of the benchmarks: what is written to a checkpoint is what would have been made in memory."""

import pytest
import torch

from qerl.benchmarking.synthetic import model_config, random_base, write_checkpoint
from qerl.quant.base_weights import BaseWeights

CPU = torch.device("cpu")


@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
def test_a_written_checkpoint_is_the_random_base(tmp_path, format):
    config = model_config("tiny", 1)
    made = random_base(config, format, CPU)
    write_checkpoint(tmp_path, config, CPU, format)
    read = BaseWeights.load(tmp_path, format=format, dtype=torch.float32, device=CPU)
    assert read.linears.keys() == made.linears.keys()
    for name, weight in made.linears.items():
        assert torch.equal(read.linears[name].expand(torch.float32), weight.expand(torch.float32))
    for name, tensor in made.tensors.items():
        assert torch.equal(read.tensors[name], tensor)
