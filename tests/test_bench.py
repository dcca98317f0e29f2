"""`qerl bench`: its words, its arms on a CPU, and that what it says follows from what was measured."""

import json
import subprocess
import sys

import bench_children
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from qerl import bench, bench_step
from qerl.benchmarking import processes, rollout_arms, summary, update_arms
from qerl.benchmarking.processes import measure_in_process, measure_in_turn
from qerl.benchmarking.profile import kind_of, less, shares
from qerl.benchmarking.synthetic import model_config, random_base, write_outline
from qerl.errors import UserError
from qerl.quant.base_weights import check_source

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gpu(request, monkeypatch):
    if "gpu" not in request.keywords:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# ---- the command ----


def test_help_answers_before_torch_is_imported():
    code = "import sys, qerl.bench\nassert 'torch' not in sys.modules\nqerl.bench.main(['step', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--problems" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: update|rollout|step"),
        (["upd"], "invalid choice: 'upd'"),
        (["update", "--model", "qwen2.5-7"], "--model qwen2.5-7: neither a shape"),
        (["update", "--model", "quickstrat"], "neither a shape"),
        (["update", "--model", "7b", "--layers", "29"], "7b has 28 layers; give 1 to 28"),
        (["update", "--layers", "0"], "'0' is not a whole number above 0"),
        (["update", "--tokens", "8k"], "'8k' is not a whole number"),
        (["update", "--sequences", "8"], "unrecognized arguments: --sequences 8"),
        (["rollout", "--sequences", "8,20"], "20 is not a multiple of 8"),
        (["step", "--json", "/no/such/folder/a.json"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(words, message, monkeypatch):
    monkeypatch.setattr(processes, "measure_in_process", None)
    with pytest.raises(UserError, match=message.replace("|", r"\|")) as caught:
        bench.main(words)
    assert "\n" not in str(caught.value)


def test_a_tiny_update_ends_in_a_table_and_json(tmp_path, capsys):
    file = tmp_path / "update.json"
    assert bench.main(["update", "--tokens", "128", "--json", str(file)]) == 0
    said, report = capsys.readouterr().out, json.loads(file.read_text())
    assert {row["arm"] for row in report["rows"]} == {"ours", "floor", "hf-fp32"}
    assert {row["layers"] for row in report["rows"]} == {2, 1}
    assert report["device"].startswith("CPU") and report["versions"]["torch"] == torch.__version__
    assert set(report["ratios"]) == {"update_vs_floor", "update_vs_hf-fp32"}
    assert f"{100 * report['ratios']['update_vs_floor']:.0f} % of the floor's speed" in said
    assert "update: tiny, all 2 layers" in said and "on CPU (" in said
    assert "GEMMs" in said


def test_an_arm_that_fails_is_named_and_the_others_are_told(monkeypatch, capsys):
    arms = (("good", bench_children.some_rows, (3,)), ("bad", bench_children.fails_after_a_row, ()))
    plan = bench.Plan("test", arms, lambda rows: summary.Summary([f"{len(rows)} rows"], {}))
    monkeypatch.setattr(bench, "_plan", lambda *_: plan)
    assert bench.main(["update"]) == 1
    said = capsys.readouterr().out
    assert "4 rows" in said and "bad was not measured: ValueError: no room" in said


# ---- processes ----


@pytest.mark.parametrize(
    ("measure", "failure"),
    [
        (bench_children.fails_after_a_row, "ValueError: no room"),
        (bench_children.ends_itself, "its process ended with SIGKILL"),
    ],
)
def test_rows_survive_an_arm_that_fails(measure, failure):
    told = []
    outcome = measure_in_process(measure, tell=told.append)
    assert outcome.rows == told == [{"number": 0}]
    assert outcome.failure == failure


def test_arms_that_start_together_measure_in_turn(tmp_path):
    file, told = tmp_path / "turns", []
    jobs = [
        (bench_children.writes_its_turns, ("a", file)),
        (bench_children.ends_itself, ()),
        (bench_children.writes_its_turns, ("b", file)),
    ]
    first, killed, last = measure_in_turn(jobs, tell=told.append)
    assert file.read_text() == "a0 b0 a1 b1 "
    assert [row["number"] for row in first.rows + last.rows] == [0, 1, 0, 1]
    assert first.failure is last.failure is None
    assert killed.failure == "its process ended with SIGKILL"
    assert len(told) == 5


# ---- arms ----


def batch_of(count, prompt=8, completion=16):
    (batch,) = update_arms.unshared(update_arms.same_items(count, prompt, completion), 10**6, CPU)
    return batch


def test_the_floor_makes_the_products_of_an_update_and_no_others():
    config = model_config("tiny", 2)
    floor, batch = update_arms.start("floor", config, CPU), batch_of(3)
    floor.step(batch)
    with FlopCounterMode(display=False) as counter:
        floor.step(batch)
    linears = sum(f.num_weights for f in random_base(config, "bf16", CPU).layout.linears)
    head = config.vocab_size * config.hidden_size
    # On a CPU forward and dX; the head's forward is made twice.
    expected = 2 * len(batch.token_ids) * 2 * linears + 2 * len(batch.target_ids) * 3 * head
    assert counter.get_total_flops() == expected
    floor.keep_layers(1)
    with FlopCounterMode(display=False) as counter:
        floor.step(batch)
    assert counter.get_total_flops() == expected - 2 * len(batch.token_ids) * linears


@pytest.mark.parametrize("arm", ["ours", "ours-nf4", "hf-nf4", "hf-nf4-fp32", "hf-bf16", "hf-fp32"])
def test_every_update_arm_gives_every_layer_a_gradient(arm):
    update = update_arms.start(arm, model_config("tiny", 2), CPU)
    update.step(batch_of(2))
    moved = [p.grad is not None and bool(p.grad.any()) for p in update.parameters]
    # A has none while B is zero.
    assert sum(moved) == len(moved) // 2 == 14
    update.keep_layers(1)
    for parameter in update.parameters:
        parameter.grad = None
    update.step(batch_of(2))
    assert sum(p.grad is not None and bool(p.grad.any()) for p in update.parameters) == 7


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "qwen3-0.6b", "llama3.1-8b", "0.5b"])
def test_shapes_and_presets_have_sizes(name):
    config = model_config(name, 2)
    assert config.num_hidden_layers == 2
    assert len(rollout_arms.build_layout(config).linears) == 8


def test_a_rollout_arm_generates_and_knows_what_it_must_read():
    work = rollout_arms.RolloutWork("tiny", 1, (8,), prompt=16, generated=8)
    started, row = rollout_arms.measure("ours", rollout_arms.start_ours, work)
    assert started is None and row is not None
    assert row["engine"].startswith("transformers (no GPU")
    assert row["tokens_per_s"] > 0 and sum(row["shares"].values()) == pytest.approx(1, abs=0.01)
    assert row["kernel_ms"] > 0 and row["base_copies"] == 1
    base = random_base(work.config, "nvfp4", CPU)
    packed = sum(weight.nbytes for weight in base.linears.values())
    head = base.tensors["lm_head.weight"].nbytes
    members = [(rows, f.num_columns) for f in base.layout.linears for rows in f.member_rows]
    adapter = 4 * 32 * sum(rows + columns for rows, columns in members)
    cache = 8 * (16 + 8 / 2) * 2 * 128 * 4
    assert row["step_bytes"] == packed + head + adapter + cache


@pytest.mark.parametrize("arm", ["ours", "ours-equal-work", "qlora"])
def test_a_step_arm_runs_whole_steps(arm):
    work = bench_step.StepWork("tiny", 1, problems=4, samples=4, prompt=16, completion=8, steps=3)
    rows = list(bench_step.measure(arm, work))
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["step_s"] == pytest.approx(sum(row[f"{p}_s"] for p in bench_step.PHASES))
        assert 0 < row["completion_tokens"] <= 4 * 4 * 8
        if arm == "ours":
            assert row["trained_tokens"] <= row["completion_tokens"]
        else:
            assert row["trained_tokens"] == row["completion_tokens"]


def test_the_practised_adapter_reaches_the_engine(monkeypatch):
    """What the other trainer learns is what is sampled from: its B leaves zero in the engine's copy too."""
    seen = []
    steps = bench_step._practised_steps

    def watch(run):
        for row in steps(run):
            norms = {n: p.detach().norm().item() for n, p in run.policy.trainable_parameters()}
            seen.append(sum(norm for name, norm in norms.items() if "lora_B" in name))
            yield row

    monkeypatch.setattr(bench_step, "_practised_steps", watch)
    work = bench_step.StepWork("tiny", 1, problems=4, samples=4, prompt=16, completion=8, steps=3)
    list(bench_step.measure("qlora", work))
    assert seen[0] == 0 < seen[1] < seen[2]


def test_an_outline_passes_for_a_checkpoint_and_takes_no_room(tmp_path):
    config = model_config("0.5b")
    write_outline(tmp_path / "model", config)
    found, layout = check_source(tmp_path / "model", "nvfp4")
    assert found.num_hidden_layers == 24 and len(layout.linears) == 96
    status = (tmp_path / "model" / "model.safetensors").stat()
    assert status.st_size > 10**9 and 512 * status.st_blocks < 10**6


# ---- what is said ----


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "GEMMs"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "GEMMs"),
        ("humming_kernel", "GEMMs"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("_expand_humming", "unpacking"),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>", "unpacking"),
        ("_grow_gated", "adapter"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("triton_poi_fused_mul_silu_0", "element-wise and other"),
    ],
)
def test_kernels_are_sorted_by_name(kernel, kind):
    assert kind_of(kernel) == kind


def test_a_decode_step_is_a_longer_generation_less_its_first_token():
    long = [
        {"name": "gemm", "ms": 9.0, "calls": 9},
        {"name": "step", "ms": 16.0, "calls": 8},
        {"name": "prefill", "ms": 50.0, "calls": 3},
    ]
    first = [{"name": "prefill", "ms": 49.0, "calls": 3}, {"name": "gemm", "ms": 1.5, "calls": 1}]
    assert less(long, first) == [
        {"name": "step", "ms": 16.0, "calls": 8},
        {"name": "gemm", "ms": 7.5, "calls": 8},
    ]


def test_shares_add_up():
    rows = [
        {"name": "nvjet_a", "ms": 6.0},
        {"name": "nvjet_b", "ms": 1.5},
        {"name": "x", "ms": 2.5},
    ]
    assert shares(rows) == {"GEMMs": 0.75, "element-wise and other": 0.25}


def update_row(arm, layers, ms):
    return {"arm": arm, "layers": layers, "ms": ms, "tokens": 1000, "shares": {"GEMMs": 1.0}}


def test_the_whole_model_follows_from_two_depths():
    ours = [update_row("ours", 8, 90.0), update_row("ours", 2, 30.0)]
    floor = [update_row("floor", 8, 72.0), update_row("floor", 2, 24.0)]
    found = summary.summarize_update(ours + floor, num_layers=64)
    # 10 ms a layer and 10 besides; 8 and 8.
    assert found.ratios == {"update_vs_floor": round((8 * 64 + 8) / (10 * 64 + 10), 3)}
    assert "80 % of the floor's speed: the dense products alone." in found.lines
    assert found.lines[1].split()[-4:] == ["10.0", "10.0", "650.0", "1,538"]
    assert found.lines[-1] == "Where kernel time at 8 layers goes: GEMMs 100 %."


def test_steps_are_compared_by_medians_of_completion_tokens_a_second():
    def row(arm, rollout_s, update_s, tokens=100):
        times = {"rollout_s": rollout_s, "update_s": update_s, "reward_s": 0.0, "sync_s": 0.0}
        return {"arm": arm, **times, "step_s": rollout_s + update_s, "completion_tokens": tokens}

    ours = [row("ours", 3.0, 1.0), row("ours", 3.0, 1.0), row("ours", 90.0, 9.0)]
    found = summary.summarize_step([*ours, row("qlora", 5.0, 5.0), row("own-nf4", 4.0, 4.0, 50)])
    assert found.ratios == {"step_vs_qlora": 2.5, "step_vs_own_nf4": 4.0}
    assert found.lines[-1] == "Where a step goes: rollout 75 %, update 25 %."


@pytest.mark.gpu
@pytest.mark.parametrize("words", [["update"], ["rollout", "--sequences", "8"], ["step"]])
def test_on_a_gpu_every_arm_is_measured(words, tmp_path):
    file = tmp_path / "bench.json"
    words = [*words, "--model", "0.5b", "--layers", "2", "--json", str(file)]
    assert bench.main(words) == 0, json.loads(file.read_text())["failures"]
    assert json.loads(file.read_text())["ratios"]
