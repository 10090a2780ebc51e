"""What one option of a run is: its type, bounds, choices, names and help.

``options.RunConfig`` declares every option once with :func:`option`; flags, YAML keys, ``config.yml`` and the
option reference are all derived from the :class:`OptionSpec` kept in the field's metadata.
"""

import dataclasses
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Type

from ipucnn.aliases import PlainValue
from ipucnn.config import bounds, values
from ipucnn.errors import ConfigurationError
from ipucnn.text import shown_value

METADATA_KEY = "ipucnn.option"

TRAIN = ("train",)
RUN = ("train", "benchmark")
PLAN = ("train", "benchmark", "plan-splits")
NETWORK = (*PLAN, "evaluate", "infer", "export")
DATA = ("train", "evaluate", "infer", "export", "benchmark", "verify-dataset")
DEVICE = ("train", "evaluate", "infer", "export", "benchmark")


class Kind(NamedTuple):
    """How the text or YAML value of an option becomes its Python value."""

    parse: Callable[[Any], Any]
    metavar: str
    is_list: bool = False
    is_number: bool = False


KINDS: Dict[Any, Kind] = {
    bool: Kind(values.parse_bool, ""),
    int: Kind(values.parse_int, "INT", is_number=True),
    float: Kind(values.parse_float, "FLOAT", is_number=True),
    str: Kind(values.parse_str, "TEXT"),
    Tuple[int, int]: Kind(values.parse_image_size, "SIZE"),
    Tuple[int, ...]: Kind(values.parse_int, "INT...", is_list=True, is_number=True),
    Tuple[float, ...]: Kind(values.parse_float, "FLOAT...", is_list=True, is_number=True),
    Tuple[str, ...]: Kind(values.parse_str, "TEXT...", is_list=True),
    Dict[str, Any]: Kind(values.parse_dict, "DICT"),
}


def _kind_of(annotation: object) -> Tuple[Any, bool]:
    """The entry of KINDS an annotation belongs to, and whether it is Optional."""
    for known in KINDS:
        if annotation == Optional[known]:
            return known, True
    return annotation, False


@dataclasses.dataclass(frozen=True)
class OptionSpec:
    """One option.

    Attributes:
        name: the RunConfig field, e.g. ``micro_batch_size``.
        key: the YAML key and the flag without ``--``, e.g. ``micro-batch-size``.
        aliases: further keys (and flags) that mean the same.
        wishes: words, apart by spaces, that people of other programs type or look for; no flags, but help finds the
            option by them.
        default: the value when neither a preset nor a flag gives one.
        help: one sentence for ``--help`` and the option reference.
        panel: the help panel it is listed in.
        kind: its type.
        optional: whether ``none`` is a value.
        minimum, maximum: inclusive bounds (of each element of a list).
        above, below: exclusive bounds.  A number has ``maximum`` or ``below``, and a lower bound; see ``bounds``.
        choices: the legal values, compared without regard to case, ``-`` and ``_``.
        parse: overrides the kind's parser.
        to_yaml: turns the value into what YAML shows, where they differ.
        metavar: how ``--help`` names the value.
        commands: the commands that take the flag.
        host_effect: whether a run on the host acts on it.
        ipu_effect: whether a run on IPUs acts on it.  One of the two does; a test looks for who reads it.
        in_yaml: False for options that only make sense as a flag.
        default_text: how the reference describes a default of None.
        plan_default: what ``plan-splits`` takes instead where nothing is given; "" where it is the same.
        warning: all that a run makes of an option of that application, to be said once; "" for all others.
    """

    name: str
    key: str
    default: Any
    help: str
    panel: str
    kind: Kind
    optional: bool = False
    aliases: Tuple[str, ...] = ()
    wishes: str = ""
    minimum: Optional[float] = None
    maximum: Optional[float] = None
    above: Optional[float] = None
    below: Optional[float] = None
    choices: Tuple[str, ...] = ()
    parse: Optional[Callable[[Any], Any]] = None
    to_yaml: Optional[Callable[[Any], Any]] = None
    metavar: str = ""
    commands: Tuple[str, ...] = RUN
    host_effect: bool = True
    ipu_effect: bool = True
    in_yaml: bool = True
    default_text: str = ""
    plan_default: str = ""
    warning: str = ""

    def __post_init__(self) -> None:
        lower, upper = (self.minimum, self.above), (self.maximum, self.below)
        if not (self.host_effect or self.ipu_effect):
            raise TypeError(f"the option {self.name} has an effect neither on the host nor on IPUs")
        if self.kind.is_number and None in (_first(lower), _first(upper)):
            raise TypeError(f"the option {self.name} is a number: declare its bounds, see config/bounds.py")

    @property
    def is_bool(self) -> bool:
        return self.kind is KINDS[bool]

    @property
    def flag(self) -> str:
        return "--" + self.key

    @property
    def keys(self) -> Tuple[str, ...]:
        """Every spelling in kebab-case, the canonical one first."""
        return (self.key, *self.aliases)

    def convert(self, value: object) -> Any:
        """Turns a flag's text or a YAML value into the option's value.

        Raises:
            values.BadValue: naming the reason and, where there is one, the nearest legal value.
        """
        if value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null")):
            if self.optional:
                return None
            if value is None:
                raise values.BadValue("needs a value")
        parse = self.parse or self.kind.parse
        if self.kind.is_list:
            items = values.split_list(value)
            if len(items) > bounds.MAX_VALUES:
                raise values.BadValue(
                    f"has {len(items):,} values", hint=f"give at most {bounds.MAX_VALUES:,} values"
                )
            return tuple(self._check(parse(item)) for item in items)
        return self._check(parse(value))

    def _check(self, value: object) -> Any:
        if self.choices:
            return values.check_choice(value, self.choices)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            values.check_bounds(value, self.minimum, self.maximum, self.above, self.below)
        return value

    def yaml_value(self, value: PlainValue) -> Any:
        """The value as plain YAML data; :meth:`convert` turns it back."""
        if value is None:
            return None
        if self.to_yaml is not None:
            return self.to_yaml(value)
        return list(value) if self.kind.is_list else value


def convert_value(spec: OptionSpec, value: PlainValue, shown: str, where: str = "") -> Any:
    """``spec.convert`` with a ConfigurationError naming the option as written, the value and the reason."""
    try:
        return spec.convert(value)
    except values.BadValue as bad:
        colon = "" if shown.startswith("--") else ":"
        listed = isinstance(value, (list, tuple)) and len(value) <= bounds.MAX_VALUES
        given = shown_value(" ".join(map(shown_value, value)) if listed else value)
        hint = bad.hint
        if bad.nearest is not None:
            hint = f"the nearest legal value is {bad.nearest}: {shown}{colon} {bad.nearest}"
        raise ConfigurationError(
            f"{where}{shown}{colon} {given}: {bad.reason}", hint or f"{spec.flag} {spec.metavar}: {spec.help}"
        ) from None


def _first(bounds_of_a_side: Tuple[Optional[float], ...]) -> Optional[float]:
    return next((bound for bound in bounds_of_a_side if bound is not None), None)


def option(default: object, help: str, **details: Any) -> Any:
    """Declares one option as a dataclass field; ``details`` are the further fields of :class:`OptionSpec`."""
    metadata = {METADATA_KEY: dict(details, help=help)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def specs_of(panel: Type[Any]) -> List[OptionSpec]:
    """The specifications of a panel class, a dataclass whose fields were made by :func:`option`, in order."""
    specs = []
    for field in dataclasses.fields(panel):
        known, optional = _kind_of(field.type)
        kind = KINDS[known]
        details = dict(field.metadata[METADATA_KEY])
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        details.setdefault("metavar", "|".join(details.get("choices", ())) or kind.metavar)
        specs.append(
            OptionSpec(
                name=field.name,
                key=field.name.replace("_", "-"),
                default=default,
                panel=panel.PANEL,
                kind=kind,
                optional=optional,
                **details,
            )
        )
    return specs


@dataclasses.dataclass(frozen=True)
class Number:
    """A number besides the options of a run: of a command alone, or of a suite's row.

    Attributes:
        kind: int or float.
        minimum, maximum: inclusive.
    """

    kind: Type[Any]
    minimum: float
    maximum: float

    def convert(self, value: object) -> Any:
        """The number that a text or YAML value stands for.

        Raises:
            values.BadValue: naming the reason and the nearest legal value.
        """
        number = values.parse_int(value) if self.kind is int else values.parse_float(value)
        values.check_bounds(number, self.minimum, self.maximum)
        return number

    def flag(self, name: str) -> Callable[[Any], Any]:
        """What Typer's ``parser`` takes, for the option ``name``: a function from text to number.

        Typer's own conversion would repeat a text of any length, and take quadratic time for it.
        """

        def parse(text: object) -> Any:
            try:
                return self.convert(text)
            except values.BadValue as bad:
                least, most = values.plain_number(self.minimum), values.plain_number(self.maximum)
                example = values.plain_number(min(max(10, self.minimum), self.maximum))
                hint = f"give {what} from {least} to {most}, for example {name} {example}"
                if bad.nearest is not None:
                    hint = f"the nearest legal value is {bad.nearest}: {name} {bad.nearest}"
                raise ConfigurationError(f"{name} {shown_value(text)}: {bad.reason}", hint) from None

        what = "a whole number" if self.kind is int else "a number"
        parse.number = self  # type: ignore[attr-defined]
        parse.__name__ = what
        return parse


EXECUTIONS = Number(int, 1, 10**6)
"""Measured executions of a benchmark, each of which is kept."""
SECONDS = Number(float, 0, bounds.MAX_SECONDS)
"""How long to measure."""
STAGES = Number(int, 1, bounds.MAX_IPUS)
"""Pipeline stages; each has a layer at least, so that networks have fewer."""
ROW = Number(int, 1, bounds.MAX_COUNT)
"""Row of the table of a search."""
CLASSES = Number(int, 1, bounds.MAX_CLASSES)
"""Classes to plan a network for."""
TOP = Number(int, 1, bounds.MAX_CLASSES)
"""Most probable classes to show."""
TILE_SIDE = Number(int, 1, bounds.MAX_IMAGE_SIDE)
"""Height and width of a tile."""
THRESHOLD = Number(float, 0, 0.99)
"""Probability of class 1 above which a pixel is of class 1."""
VIEWS = Number(int, 1, 8)
"""Rotated and mirrored versions of an image; which numbers are legal, ``runs.images.segmentation`` says."""
OPSET = Number(int, 9, 99)
"""Version of the operations of an ONNX file; which ones can be written, the installed packages say."""
EXPORT_BATCH = Number(int, 1, 65536)
"""Images of each call of an exported network."""
SHARDS = Number(int, 1, 99_999)
"""Files of records of a subset; their names have five digits."""
WORKERS = Number(int, 1, 1024)
"""Files of records that are made at once."""
PIXELS = Number(int, 1, 2**31 - 1)
"""Of one image, at most; beyond it Pillow's own arithmetic ends."""
