"""A reward of whole points, so that some groups have no spread and dynamic sampling has something to replace."""


def low_or_not(completion_ids, **kwargs):
    return [float(sum(token < 64 for token in ids) > len(ids) / 3) for ids in completion_ids]
