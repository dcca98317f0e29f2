"""A reward that a random byte model can learn: the share of its completion's characters that are the letter a."""


def many_a(completions, **kwargs):
    return [text.count("a") / 16 for text in completions]
