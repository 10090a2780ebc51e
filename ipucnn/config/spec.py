"""The declaration of one option of a run: its type, bounds, choices, names and help.

``options.RunConfig`` declares every option once with :func:`option`; flags, YAML keys, ``config.yml`` and the option
reference are all derived from the :class:`OptionSpec` in the field's metadata.
"""

import dataclasses
import enum
import json
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Type

from ipucnn.aliases import PlainValue
from ipucnn.config import bounds, values
from ipucnn.config.bounds import Range
from ipucnn.errors import ConfigurationError
from ipucnn.text import shown_value

NO_BOUNDS = Range()
METADATA_KEY = "ipucnn.option"

TRAIN = ("train",)
RUN = ("train", "benchmark")
PLAN = ("train", "benchmark", "plan-splits")
NETWORK = (*PLAN, "evaluate", "infer", "export")
DATA = ("train", "evaluate", "infer", "export", "benchmark", "verify-dataset")
DEVICE = ("train", "evaluate", "infer", "export", "benchmark")


class Effect(enum.Enum):
    """What a value of an option changes in a run."""

    RESULT = "what is computed: a run that continues keeps its value"
    START = "what a run begins with, which is then saved with it: a run that continues ignores it"
    END = "when a run ends: a finished run continues only if it has changed"
    FILES = "which files are read and written, and not what is computed"
    DELIVERY = "how the work is done and reported, and not its result"


class ValueKind(NamedTuple):
    """The kind of an option's values: how their text or YAML is read, checked and written.

    Attributes:
        parse: function from a text or YAML value to the Python value; raises ``values.BadValue``.
        metavar: name of the value in ``--help``.
        is_list: whether a value is a tuple; ``parse`` then makes one element of it.
        is_number: whether a value, or each element of it, has bounds.
        is_path: whether a value is a path, in which ``~`` is a home folder.
        to_yaml: function from the value to its YAML form, if they differ.
    """

    parse: Callable[[Any], Any]
    metavar: str = ""
    is_list: bool = False
    is_number: bool = False
    is_path: bool = False
    to_yaml: Optional[Callable[[Any], Any]] = None


def int_or(word: str, stands_for: Optional[int]) -> ValueKind:
    """Returns the kind of whole numbers from 1 on, or a word, whose value is ``stands_for``."""
    return ValueKind(
        partial(values.parse_int_or, word=word, stands_for=stands_for),
        f"INT|{word}",
        is_number=True,
        to_yaml=lambda number: word if number == stands_for else number,
    )


KINDS: Dict[Any, ValueKind] = {
    bool: ValueKind(values.parse_bool),
    int: ValueKind(values.parse_int, "INT", is_number=True),
    float: ValueKind(values.parse_float, "FLOAT", is_number=True),
    str: ValueKind(values.parse_str, "TEXT"),
    Tuple[int, int]: ValueKind(values.parse_image_size, "SIZE", to_yaml=values.image_size_to_yaml),
    Tuple[int, ...]: ValueKind(values.parse_int, "INT...", is_list=True, is_number=True),
    Tuple[float, ...]: ValueKind(values.parse_float, "FLOAT...", is_list=True, is_number=True),
    Tuple[str, ...]: ValueKind(values.parse_str, "TEXT...", is_list=True),
    Dict[str, Any]: ValueKind(values.parse_dict, "DICT"),
}
"""Kinds by the annotation of the field, for options that declare no kind."""
DIRECTORY = ValueKind(values.parse_str, "DIR", is_path=True)
FILE = ValueKind(values.parse_str, "FILE", is_path=True)
WEIGHTS = ValueKind(values.parse_str, "PATH|imagenet", is_path=True)
FRACTION = ValueKind(values.parse_fraction, "N|A/B", is_number=True)
LIMIT = ValueKind(values.parse_limit, "N|P%")
POPLAR_OPTIONS = ValueKind(values.parse_poplar_options, "DICT")


@dataclasses.dataclass(frozen=True)
class OptionSpec:
    """One option.

    Attributes:
        name: the RunConfig field, e.g. ``micro_batch_size``.
        default: the value when neither a preset nor a flag gives one.
        help: one sentence for ``--help`` and the option reference.
        panel: the help panel it is listed in.
        kind: kind of its values.
        optional: whether ``none`` is a value.
        aliases: further keys (and flags) with the same meaning.
        wishes: words, separated by spaces, that users of other programs type or search for.  They are not flags, but
            help finds the option by them.
        within: bounds of a number, or of each element of a list of them.
        choices: the legal values, compared without regard to case, ``-`` and ``_``.
        metavar: name of the value in ``--help``, if neither the choices nor the kind define it.
        commands: the commands that take the flag.
        effect: what it changes in a run.  Continuing a run, comparing runs, benchmarks and processes, and the
            configuration in a checkpoint depend on it.
        host_effect: whether it affects a run on the host.
        ipu_effect: whether it affects a run on IPUs.  At least one of the two is true; a test searches for the code
            that reads the option.
        in_yaml: False for options that only make sense as a flag.
        default_text: description of a default of None in the reference.
        plan_default: default of ``plan-splits``; "" if it is the same.
        warning: the only effect of an option of the public application: a message, printed once; "" for all others.
    """

    name: str
    default: Any
    help: str
    panel: str
    kind: ValueKind
    optional: bool = False
    aliases: Tuple[str, ...] = ()
    wishes: str = ""
    within: Range = NO_BOUNDS
    choices: Tuple[str, ...] = ()
    metavar: str = ""
    commands: Tuple[str, ...] = RUN
    effect: Effect = Effect.RESULT
    host_effect: bool = True
    ipu_effect: bool = True
    in_yaml: bool = True
    default_text: str = ""
    plan_default: str = ""
    warning: str = ""

    def __post_init__(self) -> None:
        if not (self.host_effect or self.ipu_effect):
            raise TypeError(f"the option {self.name} has an effect neither on the host nor on IPUs")
        if self.kind.is_number and not self.within.is_closed:
            raise TypeError(f"the option {self.name} is a number: declare its bounds, see config/bounds.py")
        if not self.metavar:
            object.__setattr__(self, "metavar", "|".join(self.choices) or self.kind.metavar)

    @property
    def is_bool(self) -> bool:
        """Whether it is switched on and off, with ``--x`` and ``--no-x``."""
        return self.kind is KINDS[bool]

    @property
    def key(self) -> str:
        """The YAML key, and the flag without ``--``, e.g. ``micro-batch-size``."""
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        """The option's flag on the command line."""
        return "--" + self.key

    @property
    def keys(self) -> Tuple[str, ...]:
        """Every spelling in kebab-case, the canonical one first."""
        return (self.key, *self.aliases)

    def convert(self, value: object) -> Any:
        """Converts a flag's text or a YAML value to the option's value.

        Raises:
            values.BadValue: with the reason and, if there is one, the nearest legal value.
        """
        if value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null")):
            if self.optional:
                return None
            if value is None:
                raise values.BadValue("needs a value")
        if not self.kind.is_list:
            return self._convert_one(value)
        items = values.split_list(value)
        if len(items) > bounds.MAX_VALUES:
            raise values.BadValue(
                f"has {len(items):,} values", hint=f"give at most {bounds.MAX_VALUES:,} values"
            )
        return tuple(map(self._convert_one, items))

    def _convert_one(self, value: object) -> Any:
        parsed = self.kind.parse(value)
        if self.choices:
            return values.check_choice(parsed, self.choices)
        if self.kind.is_number and parsed is not None:
            values.check_bounds(parsed, self.within)
        return parsed

    def yaml_value(self, value: PlainValue) -> Any:
        """Returns the value as plain YAML data; :meth:`convert` is the inverse."""
        if value is None:
            return None
        if self.kind.to_yaml is not None:
            return self.kind.to_yaml(value)
        return list(value) if self.kind.is_list else value

    def typed_text(self, value: PlainValue) -> str:
        """Returns a value as the user would type it; "" for none and for an empty list."""
        plain = self.yaml_value(value)
        if isinstance(plain, dict):
            return json.dumps(plain)
        if isinstance(plain, list):
            return " ".join(map(str, plain))
        if isinstance(plain, float):
            return values.plain_number(plain)
        return "" if plain is None else str(plain)


def convert_value(spec: OptionSpec, value: PlainValue, shown: str, where: str = "") -> Any:
    """Converts a value with ``spec.convert``.

    Raises:
        ConfigurationError: the message has the option as written, the value and the reason.
    """
    try:
        return spec.convert(value)
    except values.BadValue as bad:
        written = shown if shown.startswith("--") else f"{shown}:"
        listed = isinstance(value, (list, tuple)) and len(value) <= bounds.MAX_VALUES
        given = shown_value(" ".join(map(shown_value, value)) if listed else value)
        raise ConfigurationError(
            f"{where}{written} {given}: {bad.reason}",
            bad.advice(written) or f"{spec.flag} {spec.metavar}: {spec.help}",
        ) from None


def option(default: object, help: str, **details: Any) -> Any:
    """Declares one option as a dataclass field; ``details`` are the further fields of :class:`OptionSpec`."""
    metadata = {METADATA_KEY: dict(details, help=help)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def specs_of(panel: Type[Any]) -> List[OptionSpec]:
    """Returns the specifications of a panel, in order.

    Args:
        panel: a dataclass whose fields are made by :func:`option`; its ``EACH`` has details that all fields share.
    """
    specs = []
    for field in dataclasses.fields(panel):
        details = {**getattr(panel, "EACH", {}), **field.metadata[METADATA_KEY]}
        known = next((known for known in KINDS if field.type == Optional[known]), None)
        details.setdefault("kind", KINDS[known or field.type])
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        specs.append(
            OptionSpec(field.name, default, panel=panel.PANEL, optional=known is not None, **details)
        )
    return specs


@dataclasses.dataclass(frozen=True)
class Number:
    """A number that is not an option of a run, but of a single command, or of a suite's row.

    Attributes:
        type: int or float.
        within: its bounds, ``minimum`` and ``maximum``.
    """

    type: Type[Any]
    within: Range

    def convert(self, value: object) -> Any:
        """Returns the number of a text or YAML value.

        Raises:
            values.BadValue: with the reason and the nearest legal value.
        """
        number = values.parse_int(value) if self.type is int else values.parse_float(value)
        values.check_bounds(number, self.within)
        return number

    def flag(self, name: str) -> Callable[[Any], Any]:
        """Returns a function from text to number for the option ``name``, as Typer's ``parser``.

        Typer's own conversion would repeat a text of any length, and take quadratic time for it.
        """

        def parse(text: object) -> Any:
            try:
                return self.convert(text)
            except values.BadValue as bad:
                least, most = self.within.minimum or 0, self.within.maximum or 0
                limits = f"from {values.plain_number(least)} to {values.plain_number(most)}"
                example = f"{name} {values.plain_number(min(max(10, least), most))}"
                hint = bad.advice(name) or f"give {what} {limits}, for example {example}"
                raise ConfigurationError(f"{name} {shown_value(text)}: {bad.reason}", hint) from None

        what = "a whole number" if self.type is int else "a number"
        parse.number = self  # type: ignore[attr-defined]
        parse.__name__ = what
        return parse


EXECUTIONS = Number(int, Range(1, 10**6))
"""Measured executions of a benchmark; all of them are stored."""
SECONDS = Number(float, Range(0, bounds.MAX_SECONDS))
"""Duration of a measurement."""
STAGES = Number(int, Range(1, bounds.MAX_IPUS))
"""Pipeline stages; each has at least one layer, so that networks have fewer."""
ROW = Number(int, Range(1, bounds.MAX_COUNT))
"""Row of the table of a search; the first is 1."""
CLASSES = Number(int, Range(1, bounds.MAX_CLASSES))
"""Classes to plan a network for."""
TOP = Number(int, Range(1, bounds.MAX_CLASSES))
"""Most probable classes to show."""
PATCH_SIDE = Number(int, Range(1, bounds.MAX_IMAGE_SIDE))
"""Height and width of an input patch."""
THRESHOLD = Number(float, Range(0, 0.99))
"""Probability of class 1 above which a pixel is of class 1."""
TEST_TIME_AUGMENTATION = Number(int, Range(1, 8))
"""Rotated and mirrored versions of an image; ``runs.images.segmentation`` defines the legal numbers."""
OPSET = Number(int, Range(9, 99))
"""Version of the operations of an ONNX file; the installed packages determine which can be written."""
EXPORT_BATCH = Number(int, Range(1, 65536))
"""Images of each call of an exported network."""
SHARDS = Number(int, Range(1, 99_999))
"""Files of records of a subset; the number in a file's name has five digits."""
WORKERS = Number(int, Range(1, 1024))
"""Files of records that are written at a time."""
PIXELS = Number(int, Range(1, 2**31 - 1))
"""Limit of the pixels of one image; Pillow's own arithmetic allows no more."""
