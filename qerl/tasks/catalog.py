"""Data sets that are known by name: where they are, how they are laid out, and how an answer is asked for.

Each entry says in its comment which columns the data really have (as of 2026, from the data sets' own cards), so that a
local copy of the same layout (`task.path`) works without any other setting. A loader is `data.load_dataset_task`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """How a data set becomes a task; what a user sets wins."""

    hub_id: str | None = None
    config: str | None = None
    train_split: str | None = "train"
    """None: for evaluation only."""
    test_split: str | None = None
    """None: test if there is one, else a tenth of the training split."""
    answer_columns: tuple[str, ...] = ()
    """Tried in this order before the usual names."""
    gold_format: str | None = None
    """The form in which the data's answers hold the gold one (`answers.ANSWER_FORMATS`); it must be found."""
    answer_format: str | None = None
    """How completions are to give the answer; the prompts' own wish goes first."""
    system_prompt: str | None = None
    """Instead of the format's instruction."""
    drop_repeats: bool = False
    """Keep only the first of the rows that have the same prompt."""
    level_configs: bool = False
    """`task.levels` chooses a configuration of the hub data set, as level_3_4_5."""


DATASETS: dict[str, Recipe] = {
    # openai/gsm8k, config main: question, answer ("... #### 18"); train 7,473, test 1,319. The last number is graded:
    # models rarely write #### at first, and the format is learnt on the way.
    "gsm8k": Recipe(
        "openai/gsm8k",
        config="main",
        gold_format="hashes",
        answer_format="last_number",
        system_prompt=(
            "Solve the problem. Think step by step, "
            "then give the final answer on the last line as #### NUMBER."
        ),
    ),
    # DigitalLearningGmbH/MATH-lighteval: problem, level ("Level 5"), type, solution (with a \boxed{}); train 7,500,
    # test 5,000. MATH-500 is part of its test split.
    "math": Recipe(
        "DigitalLearningGmbH/MATH-lighteval",
        answer_columns=("solution",),
        gold_format="boxed",
        answer_format="boxed",
    ),
    # open-r1/Big-Math-RL-Verified-Processed, configs all, level_1 ... level_5, level_3_4_5, ...: prompt, solution (the
    # answer alone), source, domain, llama8b_solve_rate. The original, SynthLabsAI/Big-Math-RL-Verified, has problem and
    # answer instead. Some thousand problems are there twice.
    "big-math": Recipe(
        "open-r1/Big-Math-RL-Verified-Processed",
        config="all",
        answer_format="boxed",
        drop_repeats=True,
        level_configs=True,
    ),
    # open-r1/DAPO-Math-17k-Processed, configs all, en, cn: prompt, solution (the answer alone), data_source,
    # source_prompt, ability, reward_model, extra_info. The original, BytedTsinghua-SIA/DAPO-Math-17k, has messages in
    # prompt, which ask for a last line "Answer: $Answer", the answer in reward_model.ground_truth, and each of the 17k
    # problems a hundred times.
    "dapo-math-17k": Recipe(
        "open-r1/DAPO-Math-17k-Processed",
        config="all",
        answer_columns=("reward_model.ground_truth",),
        answer_format="boxed",
        drop_repeats=True,
    ),
    # HuggingFaceH4/MATH-500: problem, solution, answer, subject, level (a number), unique_id; test 500.
    "math-500": Recipe(
        "HuggingFaceH4/MATH-500", train_split=None, test_split="test", answer_format="boxed"
    ),
    # HuggingFaceH4/aime_2024: id, problem, solution, answer, url, year; its only split is called train, 30 rows.
    "aime24": Recipe(
        "HuggingFaceH4/aime_2024", train_split=None, test_split="train", answer_format="boxed"
    ),
    # math-ai/aime25: problem, answer, id; test 30.
    "aime25": Recipe("math-ai/aime25", train_split=None, test_split="test", answer_format="boxed"),
    # math-ai/amc23: id, question, answer (a float: 27.0), url; test 40.
    "amc23": Recipe("math-ai/amc23", train_split=None, test_split="test", answer_format="boxed"),
}
