"""Converts the text of a flag or a YAML value to the value of an option, or gives the reason why it cannot.

Flags and YAML use the same functions, so ``--precision 16.16``, ``precision: 16.16`` (a float to YAML) and ``precision:
'16.16'`` are one value, and so are ``1e-5`` (a string to YAML 1.1) and ``0.00001``.
"""

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from ipucnn import documents
from ipucnn.aliases import PlainValue
from ipucnn.config.bounds import (
    LEAST_FRACTION,
    MAX_COUNT,
    MAX_FLOAT32,
    MAX_GROUPS,
    MAX_IMAGE_SIDE,
    MAX_TEXT,
    MAX_VALUES,
    Range,
)
from ipucnn.config.parameters import method_of
from ipucnn.documents import MAX_NUMBER_CHARACTERS
from ipucnn.errors import did_you_mean
from ipucnn.filesystem import expand_user
from ipucnn.text import shown_value

TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_DIGITS = re.compile(r"[-+]?[0-9]+")
# Stands for a whole number with too many digits; with a sign it is still within the limit of characters.
_BEYOND = 10 ** (MAX_NUMBER_CHARACTERS - 2)


class BadValue(ValueError):
    """A value that an option cannot take.

    Args:
        reason: the reason, which follows ``--option VALUE: ``.
        nearest: the nearest legal value as the user would type it, or None.
        hint: the remedy, if it is more than the nearest value.
    """

    def __init__(self, reason: str, nearest: object = None, hint: Optional[str] = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.nearest = None if nearest is None else str(nearest)
        self.hint = hint

    def advice(self, typed: str = "") -> Optional[str]:
        """Returns the remedy: the nearest legal value, also after ``typed``, or the hint; None if there is none."""
        if self.nearest is None:
            return self.hint
        subject = "values are" if " " in self.nearest else "value is"
        return f"the nearest legal {subject} {self.nearest}" + (typed and f": {typed} {self.nearest}")


def parse_bool(value: object) -> bool:
    """Returns True or False from a YAML boolean or one of the words for it."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise BadValue("must be True or False")


def parse_int(value: object, what: str = "a whole number") -> int:
    """Returns a whole number; ``8.0`` is one, ``8.5`` is not.

    A text of more digits than any option takes returns a number beyond every bound.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"[-+]?[0-9]([0-9_]*[0-9])?", text) and "__" not in text:
            digits = text.replace("_", "")
            if len(digits) <= MAX_NUMBER_CHARACTERS:
                return int(digits)
            return -_BEYOND if digits[0] == "-" else _BEYOND
    number = parse_float(value, what)
    if math.isinf(number):
        return _BEYOND if number > 0 else -_BEYOND
    if number != int(number):
        raise BadValue(f"must be {what}", nearest=max(1, round(number)))
    return int(number)


def parse_float(value: object, what: str = "a number") -> float:
    """Returns a number; one too large for a float is infinite, which every option's bounds refuse."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise BadValue(f"must be {what}")
    if isinstance(value, str) and len(value) > MAX_NUMBER_CHARACTERS:
        if not _DIGITS.fullmatch(value):
            _check_length(value, what)
        value = "-inf" if value[0] == "-" else "inf"
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if int(value) > 0 else -math.inf
    except ValueError:
        raise BadValue(f"must be {what}") from None
    if math.isnan(number):
        raise BadValue(f"must be {what}, not NaN")
    return number


def _check_length(text: str, what: str, at_most: int = MAX_NUMBER_CHARACTERS) -> None:
    if len(text) > at_most:
        raise BadValue(f"must be {what}, and has more than {at_most:,} characters", hint="write it shorter")


def parse_str(value: object) -> str:
    """Returns text; a YAML number or date is read as the text it was written as."""
    if isinstance(value, (bool, list, tuple, dict)):
        raise BadValue("must be text")
    text = str(value).strip()
    if not text:
        raise BadValue("must not be empty")
    _check_length(text, "text", MAX_TEXT)
    for character in text:
        if character == "\0" or "\ud800" <= character <= "\udfff":
            raise BadValue(
                "must be text that UTF-8 can hold", hint="remove what is not UTF-8, and NUL characters"
            )
    return text


def parse_dataset(value: object) -> str:
    """Returns the name of a data set; if it is registered, in the registered spelling.

    ``gc-imagenet`` is the former name of ``imagenet`` in Graphcore's public application.
    """
    from ipucnn.datasets.registry import canonical

    name = parse_str(value)
    return "imagenet" if name.lower().replace("_", "-") == "gc-imagenet" else canonical(name) or name


def parse_path(value: object) -> Path:
    """Returns a path, in which ``~`` and ``~user`` are expanded, of any characters."""
    return expand_user(str(value))


def parse_saved_path(value: object) -> Path:
    """Returns a path that ``config.yml`` can hold."""
    return expand_user(parse_str(value))


def path_to_yaml(path: Path) -> str:
    """Returns the text of a path: what :func:`parse_path` reads as the same path."""
    return f"./{path}" if str(path).startswith("~") else str(path)


def parse_weights(value: object) -> str:
    """Returns a path, or ``imagenet`` however it is capitalised."""
    text = parse_str(value)
    return text.lower() if text.lower() == "imagenet" else text


def parse_freeze(value: object) -> str:
    """Returns a number of layers, or patterns of their names separated by commas."""
    text = parse_str(value)
    if re.fullmatch(r"[-+]?[0-9.]+", text):
        number = parse_int(text)
        check_bounds(number, Range(minimum=1))
        return str(number)
    patterns = [part.strip() for part in text.split(",")]
    if not all(patterns):
        raise BadValue("has an empty pattern", hint="write patterns as in: --freeze 'conv1,block1*'")
    return ",".join(patterns)


def parse_fraction(value: object) -> float:
    """Returns a number or a fraction such as ``1/3``: events per epoch, or epochs between events."""
    what = "a number or a fraction such as 1/4"
    if isinstance(value, str) and "/" in value:
        parts = [part.strip() for part in value.split("/", 1)]
        if not all(map(_DIGITS.fullmatch, parts)) or parse_int(parts[1]) < 1:
            raise BadValue(f"must be {what}")
        above, below = map(parse_int, parts)
        number = above / below
    else:
        number = parse_float(value, what)
    if 0 < number < LEAST_FRACTION:
        raise BadValue(
            f"must be 0, or at least {LEAST_FRACTION:g}: once in {1 / LEAST_FRACTION:,.0f} epochs",
            nearest=f"{LEAST_FRACTION:g}",
        )
    return number


ALL = 0
"""Value of --devices for "all"."""


def parse_int_or(value: object, word: str, stands_for: Optional[int]) -> Optional[int]:
    """Returns a whole number from 1 on, or ``stands_for`` for the word."""
    if str(value).strip().lower() == word:
        return stands_for
    try:
        number = parse_int(value)
    except BadValue as bad:
        nearest = 1 if bad.nearest is None else bad.nearest
        raise BadValue(f"{bad.reason}, or {word}", nearest, bad.hint) from None
    if number < 1:
        raise BadValue(f"must be at least 1, or {word}", nearest=1)
    return number


def parse_percent(value: object) -> float:
    """Returns a percentage; a proportion such as 0.6 is refused, because 0.6 % is hardly meant."""
    number = parse_float(value)
    if 0 < number < 1:
        raise BadValue("must be a percentage", nearest=f"{number * 100:g}")
    return number


def parse_proportion(value: object) -> float:
    """Returns a number; one that can only be a percentage, such as 75, is refused, because a proportion is meant."""
    number = parse_float(value)
    if 1 < number <= 100:
        raise BadValue("must be a proportion, at most 1", nearest=f"{number / 100:.15g}")
    return number


def parse_rounding(value: object) -> str:
    """Returns ``ON``, ``OFF`` or ``RI`` (identical in all replicas) from a boolean or one of the words."""
    word = str(value).strip().upper()
    if word in ("RI", "REPLICA_IDENTICAL_ONLY", "REPLICA-IDENTICAL-ONLY"):
        return "RI"
    try:
        return "ON" if parse_bool(value) else "OFF"
    except BadValue:
        raise BadValue("must be ON, OFF or RI (the same in all replicas)") from None


def parse_noise(value: object) -> object:
    """Returns ``host`` for ``cpu``, the word in the public application's description; other values are unchanged."""
    return "host" if str(value).strip().lower() == "cpu" else value


def parse_folds(value: object) -> Optional[int]:
    """Returns a number of folds; 1 means none, as in the public U-Net application."""
    folds = parse_int(value)
    return None if folds == 1 else folds


def parse_share(value: object) -> float:
    """Returns a share of less than all: ``5%`` or ``0.05``."""
    text = str(value).strip()
    what = "a share below 1 or a percentage below 100%"
    share = parse_float(text.rstrip("%").strip(), what) / (100.0 if text.endswith("%") else 1.0)
    if not 0 <= share < 1:
        raise BadValue(f"must be {what}")
    return share


def parse_limit(value: object) -> str:
    """Returns a number of samples (``500``) or a share of the set (``10%``), as text."""
    what = "a number of samples such as 500, or a share such as 10%"
    if isinstance(value, str) and value.rstrip().endswith("%"):
        share = parse_float(value.rstrip()[:-1], what)
        if not 0 < share <= 100:
            nearest = "100%" if share > 100 else None
            raise BadValue("must be a share above 0% and up to 100%", nearest)
        return f"{share:.15g}%"
    number = parse_int(value, what)
    if number < 1:
        raise BadValue("must be at least 1 sample", nearest=1)
    check_bounds(number, Range(maximum=MAX_COUNT))
    return str(number)


def parse_image_size(value: object) -> Tuple[int, int]:
    """Returns (height, width) from ``224``, ``388x512`` or ``[388, 512]``."""
    parts: Sequence[Any] = [value]
    if isinstance(value, str):
        parts = value.lower().split("x")
    elif isinstance(value, (list, tuple)):
        parts = value
    try:
        sides = [parse_int(part) for part in parts] if len(parts) in (1, 2) else []
    except BadValue:
        sides = []
    if not sides:
        raise BadValue("must be a side such as 224, or height x width such as 388x512")
    if min(sides) < 1:
        raise BadValue("must be at least 1 pixel on each side")
    if max(sides) > MAX_IMAGE_SIDE:
        nearest = [min(side, MAX_IMAGE_SIDE) for side in sides]
        raise BadValue(
            f"must be at most {MAX_IMAGE_SIDE} pixels on each side",
            nearest=image_size_to_yaml((nearest[0], nearest[-1])),
        )
    return sides[0], sides[-1]


def image_size_to_yaml(size: Tuple[int, int]) -> Union[int, str]:
    """Returns ``224`` for a square, ``388x512`` otherwise."""
    return size[0] if size[0] == size[1] else f"{size[0]}x{size[1]}"


def parse_dict(value: object) -> Dict[str, Any]:
    """Returns a dictionary from YAML, or from its JSON or YAML text; text in it that is a number becomes one."""
    if isinstance(value, str):
        value = _load_text(value)
    if not isinstance(value, Mapping):
        raise BadValue("must be a dictionary such as '{\"momentum\": 0.9}'")
    settings: Dict[str, Any] = numbers_in(value)
    return settings


def parse_poplar_options(value: object) -> Dict[str, Any]:
    """Returns options of Poplar by name; Poplar's text must be able to express each value."""
    options = parse_dict(value)
    for name, setting in options.items():
        if not isinstance(setting, (str, int, float)):
            shown = shown_value(json.dumps(setting, default=str))
            raise BadValue(
                f"{name} is {shown}, and Poplar takes text, numbers, true and false",
                hint=f"give {name} such a value, or drop it",
            )
    return options


NORM_LAYERS = {"batch_norm": "batch", "custom_batch_norm": "batch", "group_norm": "group", "none": "none"}
"""Names that ``--norm-layer`` takes: the kind of norm (see ``models.registry.NORMS``).

The first name of a kind represents it.
"""


def moves_once(layer: Mapping[str, PlainValue]) -> bool:
    """Whether a checked ``--norm-layer`` updates its statistics once per weight update, not with every micro-batch."""
    return bool(layer["name"] == "custom_batch_norm")


def norm_of(layer: Mapping[str, PlainValue]) -> str:
    """Returns the kind of a checked ``--norm-layer``."""
    return NORM_LAYERS[layer["name"]]


def norm_layer_of(norm: str) -> Dict[str, Any]:
    """Returns the ``--norm-layer`` that selects a kind of norm."""
    return {"name": next(name for name, kind in NORM_LAYERS.items() if kind == norm)}


def parse_norm_layer(value: object) -> Dict[str, Any]:
    """Returns the normalisation layer as a dictionary, from its name or a dictionary of ``name`` and parameters."""
    if isinstance(value, str) and not value.lstrip().startswith("{") and ":" not in value:
        value = {"name": value}
    layer = parse_dict(value)
    name = check_choice(layer.get("name", "batch_norm"), tuple(NORM_LAYERS))
    method = method_of("norm_layer", name)
    for key, number in layer.items():
        if key == "name":
            continue
        if key not in method.defaults:
            raise BadValue(f"{name} has no parameter '{shown_value(key)}'", hint=method.hint(key))
        try:
            _check_norm_parameter(key, number)
        except BadValue as bad:
            raise BadValue(f"{key} {shown_value(number)} {bad.reason}", hint=bad.advice()) from None
    if "num_groups" in layer and "channels_per_group" in layer:
        raise BadValue("num_groups and channels_per_group exclude each other", hint="give one of them")
    return dict(layer, name=name)


def _check_norm_parameter(key: str, number: object) -> None:
    if key in ("num_groups", "channels_per_group"):
        check_bounds(parse_int(number), Range(1, MAX_GROUPS))
    elif key == "momentum":
        check_bounds(parse_float(number), Range(0, below=1))
    else:
        check_bounds(parse_float(number), Range(maximum=1, above=0))


def numbers_in(value: PlainValue, name: str = "") -> Any:
    """Returns the value with text that is a number (``'1e-5'``) made one, also inside lists and dictionaries.

    Args:
        name: position of the value, for messages: ``boundaries[3]``.

    Raises:
        BadValue: a number beyond 32 bits, NaN, text that UTF-8 cannot hold, or too many values.
    """
    if isinstance(value, (Mapping, list, tuple)):
        if len(value) > MAX_VALUES:
            raise BadValue(f"{name or 'it'} has {len(value):,} values, and at most {MAX_VALUES:,} are taken")
        if isinstance(value, Mapping):
            return {
                str(key): numbers_in(item, f"{name}.{shown_value(key)}" if name else shown_value(key))
                for key, item in value.items()
            }
        return [numbers_in(item, f"{name}[{index}]") for index, item in enumerate(value)]
    try:
        return _number_or_text(value)
    except BadValue as bad:
        # The setting is named, because it cannot be typed alone.
        raise BadValue(f"{name} {bad.reason}", hint=bad.advice()) from None


def _number_or_text(value: PlainValue) -> PlainValue:
    if isinstance(value, str):
        text = value.strip()
        if not _NUMBER.fullmatch(text):
            if text:
                parse_str(text)
            return value
        value = parse_int(text) if re.fullmatch(r"[-+]?[0-9]+", text) else parse_float(text)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        check_bounds(parse_float(value), Range(-MAX_FLOAT32, MAX_FLOAT32))
    return value


def split_list(value: object) -> List[Any]:
    """Returns the elements of a list: a YAML list, text with commas or spaces between them, or repeated flags."""
    if isinstance(value, str):
        return [part for part in re.split(r"[,\s]+", value.strip().strip("[]")) if part]
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in (split_list(item) if isinstance(item, str) else [item])]
    if isinstance(value, Mapping):
        raise BadValue("must be a list")
    return [value]


def check_choice(value: object, choices: Sequence[str]) -> str:
    """Returns the choice that ``value`` names, regardless of case, ``-`` or ``_``."""
    folded = {choice.lower().replace("-", "_"): choice for choice in choices}
    word = "none" if value is None else str(value).strip().lower().replace("-", "_")
    if word in folded:
        return folded[word]
    raise BadValue("must be one of " + ", ".join(choices), hint=did_you_mean(word, choices))


def check_bounds(value: float, within: Range) -> None:
    """Refuses a number outside its bounds.

    Raises:
        BadValue: with the nearest legal value, if there is one.
    """
    minimum, maximum, above, below = within
    if minimum is not None and value < minimum:
        raise BadValue(f"must be at least {plain_number(minimum)}", nearest=plain_number(minimum))
    if maximum is not None and value > maximum:
        raise BadValue(f"must be at most {plain_number(maximum)}", nearest=plain_number(maximum))
    if above is not None and value <= above:
        raise BadValue(f"must be above {plain_number(above)}")
    if below is not None and value >= below:
        raise BadValue(f"must be below {plain_number(below)}")


def plain_number(number: float) -> str:
    """Returns a number as it is typed, with all digits; whole numbers have no point."""
    return str(int(number)) if abs(number) < 1e18 and number == int(number) else str(number)


def _load_text(text: str) -> Any:
    try:
        # JSON comes first: it needs no YAML library, and {"a":1} without a space after the colon is not YAML.
        with contextlib.suppress(documents.NotJson):
            return documents.load_record(text, documents.MAX_BYTES)
        return documents.load(text)
    except documents.BadDocument as bad:
        if bad.reason.startswith(documents.UNREADABLE):
            raise BadValue("is neither JSON nor YAML", hint="quote it as '{\"name\": value, ...}'") from None
        raise BadValue(f"cannot be read: {bad.reason}", hint=bad.hint) from None
