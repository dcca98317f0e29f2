"""Ask a trained policy, or any model, one question: `python -m qerl.sample RUN "prompt"`.

The prompt is asked as the run asked its own: system prompt, examples, template, engine. With --model and no adapter it
goes as it is.
"""

import sys
from typing import TYPE_CHECKING

from qerl.errors import UserError
from qerl.settings.cli import ExtraFlag, run_main
from qerl.settings.run_arguments import parse_run_arguments

if TYPE_CHECKING:
    from qerl.config import Config
    from qerl.tasks.shots import Shot

PROMPT = ExtraFlag("prompt", "The question.", positional=True)
COUNT = ExtraFlag("count", "How many answers to sample.", takes_value=True, default="1")
GREEDY = ExtraFlag("greedy", "Take the most likely token each time.")


def main(argv: list[str] | None = None) -> int:
    """Parse, load, sample, print. Returns the process' exit code."""
    config, options, adapter = parse_run_arguments(
        argv,
        prog="python -m qerl.sample",
        description='Sample answers: python -m qerl.sample RUN "prompt", or --model NAME "prompt".',
        extra_flags=(PROMPT, COUNT, GREEDY),
    )
    if options.prompt is None:
        raise UserError('the prompt is missing: python -m qerl.sample RUN "prompt"')
    if not options.count.isdecimal() or options.count == "0":
        raise UserError(f"--count {options.count}: give a whole number of answers, 1 or more")
    from dataclasses import replace

    from qerl.build import load_tokenizer, open_inference
    from qerl.metrics import printable, say
    from qerl.model.source import resolve_model
    from qerl.rollout import generate
    from qerl.tasks.prompts import encode_problems
    from qerl.types import Problem

    source = resolve_model(config.model, config.revision)
    tokenizer = load_tokenizer(source, config.trust_remote_code)
    system_prompt, shots = (config.prompt.system_prompt, ()) if adapter is None else _asked(config)
    encoded = encode_problems(
        [Problem("prompt", options.prompt, None)],
        tokenizer,
        config.prompt,
        system_prompt,
        config.rollout.max_prompt_length,
        shots,
    )
    inference = open_inference(config, source, tokenizer)
    if adapter is not None:
        inference.policy.load_adapter(adapter)
    sampling = inference.sampling
    if options.greedy:
        sampling = replace(sampling, temperature=0.0)
    batch = generate(
        inference.engine,
        tokenizer,
        encoded,
        [0],
        sampling,
        int(options.count),
        ("sample", config.seed),
    )
    say("\n---\n".join(printable(text) for text in batch.texts[0]))
    return 0


def _asked(config: "Config") -> "tuple[str | None, tuple[Shot, ...]]":
    """System prompt and examples that the run put before its problems; without its data, what the settings say."""
    from qerl.metrics import say
    from qerl.tasks import load_task
    from qerl.tasks.shots import take_shots

    own = config.prompt.system_prompt
    try:
        task, shots = take_shots(load_task(config.task), config.prompt.num_shots)
    except UserError as error:
        say(f"note: asked without the task's system prompt and examples: {error}")
        return own, ()
    return (task.system_prompt if own is None else own), shots


if __name__ == "__main__":
    sys.exit(run_main(main))
