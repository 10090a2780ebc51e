"""Nested plain values with one value altered, for tests of readers of untrusted files."""

import copy


def places(value, at=()):
    """Yields the path to every place in nested lists and dictionaries, except to the whole."""
    if at:
        yield at
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*at, key))


def altered(whole, at, draw, values):
    """Returns a copy in which the value at a path is deleted (in 30 % of the draws) or is one of ``values``."""
    changed = copy.deepcopy(whole)
    holder = changed
    for key in at[:-1]:
        holder = holder[key]
    if draw.random() < 0.3:
        del holder[at[-1]]
    else:
        holder[at[-1]] = draw.choice(values)
    return changed
