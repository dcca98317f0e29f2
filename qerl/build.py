"""Composition: from a config to the pieces of a run. Used by the entry points and by nothing else."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from qerl.cache import cache_root
from qerl.config import Config
from qerl.determinism import needs_determinism
from qerl.engine.base import Engine
from qerl.engine.choice import EngineChoice, choose_engine
from qerl.engine.transformers_engine import TransformersEngine
from qerl.engine.vllm_arguments import VllmOptions
from qerl.errors import UserError
from qerl.evaluation.policy import accuracy_note
from qerl.kernels.humming_layout import mma_of, pack
from qerl.memory import return_freed_memory
from qerl.metrics import say
from qerl.model.policy import Policy, check_adapter
from qerl.model.source import ModelSource
from qerl.planning.memory_plan import budget_of, make_memory_plan
from qerl.planning.sizes import GIB, Place, Sizes
from qerl.quant.base_weights import BaseWeights, check_source
from qerl.quant.layout import Layout
from qerl.quant.nvfp4 import Nvfp4Weight
from qerl.quant.packed import PackedWeight
from qerl.tasks import Task, load_task
from qerl.tasks.asks import notes_on_marks
from qerl.tasks.prompts import EncodedProblems, encode_problems
from qerl.tasks.rewards import RewardSpec, resolve_rewards
from qerl.tasks.shots import take_shots
from qerl.types import Sampling

PROMPTS_LOOKED_AT = 32
"""Prompts that are searched for what the rewards look for."""


def resolve_device(config: Config) -> torch.device:
    """The device to run on. Raises UserError when CUDA is asked for and absent."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "device=cuda, but torch sees no CUDA GPU; use --device cpu, or check the driver with nvidia-smi"
        )
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Compute type: bf16 on CUDA; fp32 on the CPU, where it is as fast and samples exactly what is trained."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[config.dtype]


def load_tokenizer(source: ModelSource, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises UserError naming the folder when there is none."""
    try:
        return AutoTokenizer.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        first_line = str(error).splitlines()[0]
        raise UserError(
            f"{source.folder}: no tokenizer can be read there ({first_line})"
        ) from error


def eos_token_ids(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a completion: the generation config's and the tokenizer's. Never the pad id as such."""
    ids: list[int] = []
    for file in ("generation_config.json", "config.json"):
        path = source.folder / file
        if path.exists():
            value = json.loads(path.read_text()).get("eos_token_id")
            ids.extend(value if isinstance(value, list) else [] if value is None else [value])
    if tokenizer.eos_token_id is not None:
        ids.append(cast(int, tokenizer.eos_token_id))
    if not ids:
        raise UserError(
            f"{source.folder}: neither the generation config nor the tokenizer names an end token"
        )
    return tuple(dict.fromkeys(ids))


@dataclass(frozen=True)
class Data:
    """The task in tokens."""

    task: Task
    """Without the problems that are shown as examples (`prompt.num_shots`)."""
    train: EncodedProblems
    test: EncodedProblems | None
    """None when evaluation is off or nothing is held out."""
    rewards: tuple[RewardSpec, ...]
    notes: tuple[str, ...]


def build_data(
    config: Config, tokenizer: PreTrainedTokenizerBase, *, for_training: bool = True
) -> Data:
    """Load the task and encode its prompts. Raises UserError for everything that is wrong with either.

    Without `for_training` a task may have held-out problems only, and `train` be empty.
    """
    task, shots = take_shots(load_task(config.task), config.prompt.num_shots)
    if for_training and not task.train:
        raise UserError(
            f"task {task.name} is for evaluation only; train on another, then: "
            f"python -m qerl.evaluate RUN --task {task.name}"
        )
    rewards = resolve_rewards(config.reward.reward_funcs, config.reward.reward_weights, task)
    own = config.prompt.system_prompt
    system_prompt = task.system_prompt if own is None else own

    def encode(problems: Sequence) -> EncodedProblems:
        return encode_problems(
            problems,
            tokenizer,
            config.prompt,
            system_prompt,
            config.rollout.max_prompt_length,
            shots,
        )

    train = encode(task.train)
    test = encode(task.test[: config.log.eval_size]) if task.test and config.log.eval_size else None
    if for_training and len(train.problems) < config.rollout.prompts_per_step:
        raise UserError(
            f"{len(train.problems)} training problems are fewer than prompts_per_step="
            f"{config.rollout.prompts_per_step}; lower it or give more data"
        )
    held_out = test.notes if test else ()
    accuracy = accuracy_note(rewards, task) if test and for_training else None
    prompt_ids = (train.prompt_ids or (test.prompt_ids if test else ()))[:PROMPTS_LOOKED_AT]
    notes = [
        *task.notes,
        *train.notes,
        *(f"held out: {n}" for n in held_out if n not in train.notes),
        *([accuracy] if accuracy else []),
        *notes_on_marks(rewards, [str(tokenizer.decode(list(ids))) for ids in prompt_ids]),
    ]
    return Data(task, train, test, rewards, tuple(dict.fromkeys(notes)))


def kernel_layout(
    quant: str, engine: str, device: torch.device
) -> Callable[[PackedWeight], PackedWeight] | None:
    """What brings a packed matrix into the layout of the engine's GEMM; None where the format's own is what is used.

    vLLM on a GPU multiplies NVFP4 with Humming. The trainer and the transformers engine expand, from any layout.
    """
    if quant != "nvfp4" or engine != "vllm" or device.type != "cuda":
        return None
    mma = mma_of(device)
    return lambda weight: pack(cast(Nvfp4Weight, weight), mma)


def load_base(
    config: Config,
    source: ModelSource,
    device: torch.device,
    dtype: torch.dtype,
    engine: EngineChoice,
) -> BaseWeights:
    """Pack the base, or read its cache, in the layout that the engine's kernels want."""
    if device.type == "cpu":
        return_freed_memory()
    base = BaseWeights.load(
        source.folder,
        format=config.quant,
        rounding=config.rounding,
        dtype=dtype,
        device=device,
        cache_dir=cache_root(),
        relayout=kernel_layout(config.quant, engine.name, device),
    )
    for note in base.report.notes:
        say(f"note: {note}")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what packing left behind
    return base


def build_policy(config: Config, source: ModelSource, base: BaseWeights) -> Policy:
    """The adapter on the base."""
    return Policy(
        base,
        config.lora,
        model_name=source.name,
        seed=config.seed,
        keep_initial=config.algo.beta > 0,
    )


def check_model(config: Config, source: ModelSource) -> tuple[PreTrainedConfig, Layout]:
    """All that can be found wrong with model and adapter settings before a weight is read. Raises UserError.

    Returns transformers' config of the model and the layout of its tensors.
    """
    model_config, layout = check_source(source.folder, config.quant)
    _check_lengths(config, model_config)
    linears = [member for fused in layout.linears for member in fused.members]
    _check_targets(config.lora.lora_target_modules, linears)
    if config.lora.init_adapter is not None:
        check_adapter(Path(config.lora.init_adapter), config.lora)
    return model_config, layout


def _check_targets(targets: Sequence[str], linears: Sequence[str]) -> None:
    """Every name must mean at least one linear: PEFT is content when one of several does."""
    for target in targets:
        if target != "all-linear" and not any(
            f".{name}".endswith(f".{target}") for name in linears
        ):
            leaves = dict.fromkeys(name.rpartition(".")[2] for name in linears)
            raise UserError(
                f"lora_target_modules: no linear is called {target!r}; there are {', '.join(leaves)}, or all-linear"
            )


def context_limit(model_config: PreTrainedConfig) -> tuple[int, str]:
    """Most tokens that the model can look back on, and what sets that limit."""
    values = model_config.to_dict()
    slides = "sliding_attention" in values.get("layer_types", ["sliding_attention"])
    window = values.get("sliding_window") if slides else None
    if window and window <= model_config.max_position_embeddings:
        return window, "sliding window"
    return model_config.max_position_embeddings, "context"


def _check_lengths(config: Config, model_config: PreTrainedConfig) -> None:
    longest = config.rollout.max_prompt_length + config.rollout.max_completion_length
    limit, what = context_limit(model_config)
    if longest > limit:
        raise UserError(
            f"max_prompt_length + max_completion_length = {longest} is more than the model's "
            f"{what} of {limit} tokens; lower one of them"
        )


def build_engine(config: Config, policy: Policy, choice: EngineChoice, sizes: Sizes) -> Engine:
    """The chosen engine, of the planned sizes."""
    if choice.name == "transformers":
        return TransformersEngine(policy, sizes.max_num_seqs)
    from qerl.engine.vllm_engine import VllmEngine

    engine = VllmEngine(policy, vllm_options(config, policy.device.type, sizes))
    for line in (*engine.holdings.lines(), engine.start_times.line()):
        say(line)
    return engine


def vllm_options(config: Config, device_type: str, sizes: Sizes) -> VllmOptions:
    """What a vLLM engine of the planned sizes is started with."""
    rollout = config.rollout
    return VllmOptions(
        max_model_len=rollout.max_prompt_length + rollout.max_completion_length,
        max_num_seqs=sizes.max_num_seqs,
        kv_cache_bytes=sizes.kv_cache_bytes,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        releases_cache=sizes.releases_cache,
        deterministic=needs_determinism(config, device_type),
    )


def build_sampling(config: Config, eos: tuple[int, ...]) -> Sampling:
    """How training and evaluation sample."""
    return Sampling(
        temperature=config.rollout.temperature,
        max_completion_length=config.rollout.max_completion_length,
        eos_token_ids=eos,
    )


@dataclass(frozen=True)
class Inference:
    """A policy that is asked and not trained."""

    source: ModelSource
    tokenizer: PreTrainedTokenizerBase
    policy: Policy
    engine: Engine
    sampling: Sampling


def open_inference(
    config: Config, source: ModelSource, tokenizer: PreTrainedTokenizerBase
) -> Inference:
    """Policy and engine for evaluation and sampling."""
    model_config, layout = check_model(config, source)
    device = resolve_device(config)
    dtype = resolve_dtype(config, device)
    choice = choose_engine(config.engine, device, config.quant)
    say(choice.line())
    place = Place(device.type, dtype, choice.name, config.rollout.max_prompt_length)
    budget, limit = budget_of(config, device), context_limit(model_config)[0]
    memory = make_memory_plan(config, layout, place, budget, context_limit=limit, trains=False)
    if choice.name == "vllm" and not memory.fits:
        raise UserError(
            f"{memory.budget.gib:.1f} GiB is {memory.budget.reason}; sampling needs "
            f"{memory.least_bytes / GIB:.1f} GiB at the least: take a smaller model, or lower --max-completion-length"
        )
    base = load_base(config, source, device, dtype, choice)
    policy = build_policy(config, source, base)
    engine = build_engine(config, policy, choice, memory.sizes)
    sampling = build_sampling(config, eos_token_ids(source, tokenizer))
    return Inference(source, tokenizer, policy, engine, sampling)


def run_dir_of(config: Config) -> Path:
    """The run folder: as given, or named after what the run is."""
    if config.run_dir is not None:
        return Path(config.run_dir)
    model = config.model.rstrip("/").rpartition("/")[2].replace(":", "-")
    task = (config.task.name or "dataset").replace("/", "-")
    return Path("runs") / f"{model}-{task}-{config.quant}-seed{config.seed}".lower()
