"""Plain values with one of them altered, for readers of files that anybody may have written."""

import copy


def places(value, at=()):
    """The way to every place in nested lists and dictionaries, but to the whole."""
    if at:
        yield at
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*at, key))


def altered(whole, at, draw, values):
    """A copy in which what is at a place is gone, three times of ten, or one of ``values``."""
    changed = copy.deepcopy(whole)
    holder = changed
    for key in at[:-1]:
        holder = holder[key]
    if draw.random() < 0.3:
        del holder[at[-1]]
    else:
        holder[at[-1]] = draw.choice(values)
    return changed
