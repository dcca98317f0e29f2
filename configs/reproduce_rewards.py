"""The format reward of QeRL's code, for configs/reproduce-*.toml."""

import re

TAGS = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)


def soft_format(completions, **columns):
    """0.2 for a completion that has its reasoning and its answer in tags."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [0.2 if TAGS.search(text) else 0.0 for text in texts]
