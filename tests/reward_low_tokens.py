"""A reward that a random byte model can learn: the share of its tokens that are below 64, a quarter of them at first."""


def low_tokens(completion_ids, **kwargs):
    return [sum(token < 64 for token in ids) / len(ids) for ids in completion_ids]
