"""What one option of a run is: its type, bounds, choices, names and help.

``options.RunConfig`` declares every option once with :func:`option`; flags, YAML keys, ``config.yml`` and the
option reference are all derived from the :class:`OptionSpec` kept in the field's metadata.
"""

import dataclasses
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Type

from ipucnn.config import values
from ipucnn.errors import ConfigurationError

METADATA_KEY = "ipucnn.option"

TRAIN = ("train",)
RUN = ("train", "benchmark")
PLAN = ("train", "benchmark", "plan-splits")
NETWORK = (*PLAN, "evaluate", "infer")
DATA = ("train", "evaluate", "infer", "benchmark", "verify-dataset")
DEVICE = ("train", "evaluate", "infer", "benchmark")


class Kind(NamedTuple):
    """How the text or YAML value of an option becomes its Python value."""

    parse: Callable[[Any], Any]
    metavar: str
    is_list: bool = False
    is_dict: bool = False


KINDS: Dict[Any, Kind] = {
    bool: Kind(values.parse_bool, ""),
    int: Kind(values.parse_int, "INT"),
    float: Kind(values.parse_float, "FLOAT"),
    str: Kind(values.parse_str, "TEXT"),
    Tuple[int, int]: Kind(values.parse_image_size, "SIZE"),
    Tuple[int, ...]: Kind(values.parse_int, "INT...", is_list=True),
    Tuple[float, ...]: Kind(values.parse_float, "FLOAT...", is_list=True),
    Tuple[str, ...]: Kind(values.parse_str, "TEXT...", is_list=True),
    Dict[str, Any]: Kind(values.parse_dict, "DICT", is_dict=True),
}


def _kind_of(annotation: Any) -> Tuple[Any, bool]:
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
        default: the value when neither a preset nor a flag gives one.
        help: one sentence for ``--help`` and the option reference.
        panel: the help panel it is listed in.
        kind: its type.
        optional: whether ``none`` is a value.
        minimum, maximum: inclusive bounds (of each element of a list).
        above, below: exclusive bounds.
        choices: the legal values, compared without regard to case, ``-`` and ``_``.
        parse: overrides the kind's parser.
        to_yaml: turns the value into what YAML shows, where they differ.
        metavar: how ``--help`` names the value.
        commands: the commands that take the flag.
        host_effect: False for options only an IPU acts on.
        in_yaml: False for options that only make sense as a flag.
        default_text: how the reference describes a default of None.
    """

    name: str
    key: str
    default: Any
    help: str
    panel: str
    kind: Kind
    optional: bool = False
    aliases: Tuple[str, ...] = ()
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
    in_yaml: bool = True
    default_text: str = ""

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

    def convert(self, value: Any) -> Any:
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
            return tuple(self._check(parse(item)) for item in values.split_list(value))
        return self._check(parse(value))

    def _check(self, value: Any) -> Any:
        if self.choices:
            return values.check_choice(value, self.choices)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            values.check_bounds(value, self.minimum, self.maximum, self.above, self.below)
        return value

    def yaml_value(self, value: Any) -> Any:
        """The value as plain YAML data; :meth:`convert` turns it back."""
        if value is None:
            return None
        if self.to_yaml is not None:
            return self.to_yaml(value)
        return list(value) if self.kind.is_list else value


def convert_value(spec: OptionSpec, value: Any, shown: str, where: str = "") -> Any:
    """``spec.convert`` with a ConfigurationError naming the option as written, the value and the reason."""
    try:
        return spec.convert(value)
    except values.BadValue as bad:
        colon = "" if shown.startswith("--") else ":"
        given = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        hint = bad.hint
        if bad.nearest is not None:
            hint = f"the nearest legal value is {bad.nearest}: {shown}{colon} {bad.nearest}"
        raise ConfigurationError(
            f"{where}{shown}{colon} {given}: {bad.reason}", hint or f"{spec.flag} {spec.metavar}: {spec.help}"
        ) from None


def option(default: Any, help: str, **details: Any) -> Any:
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
