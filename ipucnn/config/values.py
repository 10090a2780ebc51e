"""Turning the text of a flag or a YAML value into the value of an option, with the reason where it can't be.

Flags and YAML go through the same functions, so ``--precision 16.16``, ``precision: 16.16`` (a float to YAML)
and ``precision: '16.16'`` are one value, and so are ``1e-5`` (a string to YAML 1.1) and ``0.00001``.
"""

import json
import math
import re
from fractions import Fraction
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from ipucnn.errors import did_you_mean

TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_LIMIT = re.compile(r"(\d+)|(\d+(?:\.\d+)?) ?%")


class BadValue(ValueError):
    """A value an option can't take.

    Args:
        reason: why, to follow ``--option VALUE: ``.
        nearest: the nearest legal value as the user would type it, or None.
        hint: what to do, where it is more than the nearest value.
    """

    def __init__(self, reason: str, nearest: Optional[Any] = None, hint: Optional[str] = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.nearest = None if nearest is None else str(nearest)
        self.hint = hint


def parse_bool(value: Any) -> bool:
    """True or False from a YAML boolean or one of the words for it."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise BadValue("must be True or False")


def parse_int(value: Any) -> int:
    """A whole number; ``8.0`` is one, ``8.5`` is not."""
    number = parse_float(value, "a whole number")
    if isinstance(value, (int, str)):
        text = str(value).strip().replace("_", "")
        if re.fullmatch(r"[-+]?\d+", text):
            return int(text)
    if number != int(number):
        raise BadValue("must be a whole number", nearest=max(1, round(number)))
    return int(number)


def parse_float(value: Any, what: str = "a number") -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise BadValue(f"must be {what}")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise BadValue(f"must be {what}") from None
    if not math.isfinite(number):
        raise BadValue(f"must be {what} that is finite")
    return number


def parse_str(value: Any) -> str:
    """Text; a YAML number or date stands for the text it was written as."""
    if isinstance(value, (bool, list, tuple, dict)):
        raise BadValue("must be text")
    text = str(value).strip()
    if not text:
        raise BadValue("must not be empty")
    return text


def parse_fraction(value: Any) -> float:
    """A number or a fraction such as ``1/3``."""
    if isinstance(value, str) and "/" in value:
        try:
            return float(Fraction(value.replace(" ", "")))
        except (ValueError, ZeroDivisionError):
            raise BadValue("must be a number or a fraction such as 1/4") from None
    return parse_float(value, "a number or a fraction such as 1/4")


def parse_updates(value: Any) -> int:
    """A number of weight updates per epoch; -1 is the default, the data set's size over the global batch."""
    number = parse_int(value)
    if number < 1 and number != -1:
        raise BadValue("must be at least 1, or -1 for data set size / global batch", nearest=-1)
    return number


def parse_percent(value: Any) -> float:
    """A percentage in [1, 100]; a proportion such as 0.6 is refused rather than taken for 0.6 %."""
    number = parse_float(value)
    if 0 < number < 1:
        raise BadValue("must be a percentage", nearest=f"{number * 100:g}")
    if not 1 <= number <= 100:
        raise BadValue("must be a percentage from 1 to 100", nearest=1 if number < 1 else 100)
    return number


def parse_rounding(value: Any) -> str:
    """``ON``, ``OFF`` or ``RI`` (identical in all replicas) from a boolean or one of the words."""
    word = str(value).strip().upper()
    if word in ("RI", "REPLICA_IDENTICAL_ONLY", "REPLICA-IDENTICAL-ONLY"):
        return "RI"
    try:
        return "ON" if parse_bool(value) else "OFF"
    except BadValue:
        raise BadValue("must be ON, OFF or RI (the same in all replicas)") from None


def parse_limit(value: Any) -> str:
    """A number of samples (``500``) or a share of the set (``10%``)."""
    match = _LIMIT.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
    if match is None:
        raise BadValue("must be a number of samples such as 500, or a share such as 10%")
    if match.group(1) is not None:
        if int(match.group(1)) < 1:
            raise BadValue("must be at least 1 sample", nearest=1)
        return str(int(match.group(1)))
    if not 0 < float(match.group(2)) <= 100:
        raise BadValue("must be a share above 0% and up to 100%", nearest="100%")
    return f"{float(match.group(2)):.15g}%"


def parse_image_size(value: Any) -> Tuple[int, int]:
    """(height, width) from ``224``, ``388x512`` or ``[388, 512]``."""
    parts: Sequence[Any] = [value]
    if isinstance(value, str):
        parts = value.lower().split("x")
    elif isinstance(value, (list, tuple)):
        parts = value
    try:
        sides = [parse_int(part) for part in parts]
    except BadValue:
        sides = []
    if len(sides) not in (1, 2):
        raise BadValue("must be a side such as 224, or height x width such as 388x512")
    if min(sides) < 1:
        raise BadValue("must be at least 1 pixel on each side")
    return sides[0], sides[-1]


def image_size_to_yaml(size: Tuple[int, int]) -> Union[int, str]:
    """``224`` for a square, ``388x512`` otherwise."""
    return size[0] if size[0] == size[1] else f"{size[0]}x{size[1]}"


def parse_dict(value: Any) -> Dict[str, Any]:
    """A dictionary from YAML, or from its JSON or YAML text; text in it that is a number becomes one."""
    if isinstance(value, str):
        value = _load_text(value)
    if not isinstance(value, Mapping):
        raise BadValue("must be a dictionary such as '{\"momentum\": 0.9}'")
    return {str(key): numbers_in(item) for key, item in value.items()}


def parse_poplar_options(value: Any) -> Dict[str, Any]:
    """Options of Poplar by name; each value is one that Poplar's text can say."""
    options = parse_dict(value)
    for name, setting in options.items():
        if not isinstance(setting, (str, int, float)) or setting != setting:
            shown = json.dumps(setting, default=str)
            raise BadValue(
                f"{name} is {shown}, and Poplar takes text, numbers, true and false",
                hint=f"give {name} such a value, or drop it",
            )
    return options


NORM_LAYERS: Dict[str, Tuple[str, Tuple[str, ...]]] = {
    "batch_norm": ("batch", ("momentum", "epsilon")),
    "custom_batch_norm": ("batch", ("momentum", "epsilon")),
    "group_norm": ("group", ("num_groups", "channels_per_group", "epsilon")),
    "none": ("none", ()),
}
"""Names that ``--norm-layer`` takes: the kind of norm (see ``models.registry.NORMS``), and its parameters.

The first name of a kind stands for it.
"""


def norm_of(layer: Mapping[str, Any]) -> str:
    """The kind of a checked ``--norm-layer``."""
    return NORM_LAYERS[layer["name"]][0]


def norm_layer_of(norm: str) -> Dict[str, Any]:
    """The ``--norm-layer`` that asks for a kind of norm."""
    return {"name": next(name for name, (kind, _) in NORM_LAYERS.items() if kind == norm)}


def parse_norm_layer(value: Any) -> Dict[str, Any]:
    """The normalisation layer: its name, or a dictionary with ``name`` and that layer's parameters."""
    if isinstance(value, str) and not value.lstrip().startswith("{") and ":" not in value:
        value = {"name": value}
    layer = parse_dict(value)
    allowed = {name: parameters for name, (_, parameters) in NORM_LAYERS.items()}
    name = check_choice(layer.get("name", "batch_norm"), tuple(allowed))
    for key, number in layer.items():
        if key == "name":
            continue
        if key not in allowed[name]:
            close = did_you_mean(key, allowed[name])
            known = "has no parameters" if not allowed[name] else "takes " + ", ".join(allowed[name])
            raise BadValue(f"{name} has no parameter '{key}'", hint=close or f"{name} {known}")
        try:
            _check_norm_parameter(key, number)
        except BadValue as bad:
            raise BadValue(f"{key} {number!r} {bad.reason}", hint=bad.hint) from None
    if "num_groups" in layer and "channels_per_group" in layer:
        raise BadValue("num_groups and channels_per_group exclude each other", hint="give one of them")
    return dict(layer, name=name)


def _check_norm_parameter(key: str, number: Any) -> None:
    if key in ("num_groups", "channels_per_group"):
        check_bounds(parse_int(number), minimum=1)
    elif key == "momentum":
        check_bounds(parse_float(number), minimum=0, below=1)
    else:
        check_bounds(parse_float(number), above=0)


def numbers_in(value: Any) -> Any:
    """The value with text that is a number (``'1e-5'``) made one, also inside lists and dictionaries."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        return int(value) if re.fullmatch(r"[-+]?\d+", value.strip()) else float(value)
    if isinstance(value, Mapping):
        return {str(key): numbers_in(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [numbers_in(item) for item in value]
    return value


def split_list(value: Any) -> List[Any]:
    """The elements of a list: a YAML list, text with commas or spaces between them, or repeated flags."""
    if isinstance(value, str):
        return [part for part in re.split(r"[,\s]+", value.strip().strip("[]")) if part]
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in (split_list(item) if isinstance(item, str) else [item])]
    if isinstance(value, Mapping):
        raise BadValue("must be a list")
    return [value]


def check_choice(value: Any, choices: Sequence[str]) -> str:
    """The choice that ``value`` names, whatever its case, ``-`` or ``_``."""
    folded = {choice.lower().replace("-", "_"): choice for choice in choices}
    word = "none" if value is None else str(value).strip().lower().replace("-", "_")
    if word in folded:
        return folded[word]
    raise BadValue("must be one of " + ", ".join(choices), hint=did_you_mean(word, choices))


def check_bounds(
    value: float,
    minimum: Optional[float] = None,
    maximum: Optional[float] = None,
    above: Optional[float] = None,
    below: Optional[float] = None,
) -> None:
    """Raises BadValue, with the nearest legal value where there is one, for a number out of its bounds."""
    if minimum is not None and value < minimum:
        raise BadValue(f"must be at least {_plain(minimum)}", nearest=_plain(minimum))
    if maximum is not None and value > maximum:
        raise BadValue(f"must be at most {_plain(maximum)}", nearest=_plain(maximum))
    if above is not None and value <= above:
        raise BadValue(f"must be above {_plain(above)}")
    if below is not None and value >= below:
        raise BadValue(f"must be below {_plain(below)}")


def _plain(bound: float) -> str:
    """A bound as it is typed: whole numbers whole, where ``g`` has six digits."""
    return str(int(bound)) if bound == int(bound) else f"{bound:.15g}"


def _load_text(text: str) -> Any:
    # JSON first: it needs no YAML library, and {"a":1} without a space after the colon is JSON but not YAML.
    try:
        return json.loads(text)
    except ValueError:
        pass
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise BadValue("is neither JSON nor YAML", hint="quote it as '{\"name\": value, ...}'") from None
