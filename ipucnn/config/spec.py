"""The declaration of one option of a run: its type, bounds, choices, names and help.

``options.RunConfig`` declares every option once with :func:`option`; flags, YAML keys, ``config.yml`` and the option
reference are all derived from the :class:`OptionSpec` in the field's metadata.
"""

import dataclasses
import enum
import json
import re
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Type, Union

from ipucnn.aliases import PlainValue
from ipucnn.config import bounds, values
from ipucnn.config.bounds import Range
from ipucnn.errors import ConfigurationError, UserError
from ipucnn.filesystem import check_possible, expand_user
from ipucnn.text import shown_value

NO_BOUNDS = Range()
METADATA_KEY = "ipucnn.option"


class Effect(enum.Enum):
    """What a value of an option changes in a run: the first of these questions that is answered with yes.

    1. ``START``: is it chosen when a run begins, so that a run that continues keeps its own without an error?
    2. ``END``: does it say after how many epochs, or at which validation, a run ends?
    3. ``RESULT``: can it change the Program, or on the same device a number that a run computes, to the last digit?
    4. ``FILES``: does it only say which files and folders are read, written, kept or deleted?  What is read is compared
       by its content: the data set, a checkpoint to continue from.  Nor does a run change that is only checked.
    5. ``DELIVERY``: the rest.  It says how the same work is done, watched or reported, and perhaps how fast: device,
       processes, buffers, limits, trackers.  So benchmarks compare it, and leave out only ``FILES``.
    """

    START = "what a run begins with, which is saved with it: a run that continues keeps its own"
    END = "when a run ends: a finished run continues only if it has changed"
    RESULT = "what is computed: a run that continues keeps its value"
    FILES = "which files are read, written, kept or deleted, and nothing else"
    DELIVERY = "how the work is done and reported, and not its result"


class ValueKind(NamedTuple):
    """The kind of an option's values: how their text or YAML is read, checked and written.

    Attributes:
        parse: function from a text or YAML value to the Python value; raises ``values.BadValue``.
        metavar: name of the value in ``--help``.
        example: a value that every option of this kind takes; "" if there is none.
        is_list: whether a value is a tuple; ``parse`` then makes one element of it.
        is_number: whether a value, or each element of it, has bounds.
        is_path: whether a value is a path, or a word in place of one.
        is_split: whether one text of a list may hold several values, with commas or blanks between them.
        to_yaml: function from the value to its YAML form, if they differ.
    """

    parse: Callable[[Any], Any]
    metavar: str = ""
    example: str = ""
    is_list: bool = False
    is_number: bool = False
    is_path: bool = False
    is_split: bool = True
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
    bool: ValueKind(values.parse_bool, example="true"),
    int: ValueKind(values.parse_int, "INT", is_number=True),
    float: ValueKind(values.parse_float, "FLOAT", is_number=True),
    str: ValueKind(values.parse_str, "TEXT"),
    Path: ValueKind(values.parse_path, "FILE", is_path=True, to_yaml=values.path_to_yaml),
    Tuple[int, int]: ValueKind(values.parse_image_size, "SIZE", "224", to_yaml=values.image_size_to_yaml),
    Tuple[int, ...]: ValueKind(values.parse_int, "INT...", is_list=True, is_number=True),
    Tuple[float, ...]: ValueKind(values.parse_float, "FLOAT...", is_list=True, is_number=True),
    Tuple[str, ...]: ValueKind(values.parse_str, "TEXT...", is_list=True),
    Tuple[Path, ...]: ValueKind(
        values.parse_path,
        "FILE...",
        is_list=True,
        is_path=True,
        is_split=False,
        to_yaml=lambda paths: [*map(str, paths)],
    ),
    Dict[str, Any]: ValueKind(values.parse_dict, "DICT"),
}
"""Kinds by the annotation of the field, for options that declare no kind."""
FILE, FILES = KINDS[Path], KINDS[Tuple[Path, ...]]
SAVED_FILE = FILE._replace(parse=values.parse_saved_path)
"""A path of an option of runs."""
DIRECTORY = SAVED_FILE._replace(metavar="DIR")
WEIGHTS = ValueKind(values.parse_weights, "PATH|imagenet", is_path=True)
FRACTION = ValueKind(values.parse_fraction, "N|A/B", "1/4", is_number=True)
SHARE = ValueKind(values.parse_share, "P%", "5%")
LIMIT = ValueKind(values.parse_limit, "N|P%", "500")
POPLAR_OPTIONS = ValueKind(values.parse_poplar_options, "DICT", '{"partialsType": "half"}')
WORD = ValueKind(str, "TEXT")
"""A text of a command's own option, whatever it holds."""
WORDS = ValueKind(str, "TEXT...", is_list=True, is_split=False)


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
        synonyms: words, separated by spaces, that users of other programs type or search for.  They are not flags, but
            help finds the option by them.
        within: bounds of a number, or of each element of a list of them.
        choices: the legal values, compared without regard to case, ``-`` and ``_``.
        metavar: name of the value in ``--help``, if neither the choices nor the kind define it.
        commands: the commands that take the flag of a run; none for an option of a single command.
        effect: what it changes in a run, which each option of runs declares; None for an option of a single command.
            Continuing a run, comparing runs, benchmarks and processes, and the configuration in a checkpoint depend on
            it.
        host_effect: whether it affects a run on the host.
        ipu_effect: whether it affects a run on IPUs.  At least one of the two is true.
        updates_only: whether it affects weight updates alone: evaluations and predictions are the same without it.
        keras_effect: whether it affects Keras' own loop, the command ``fit`` of suites.
        in_yaml: False for options that only make sense as a flag.
        default_text: description of a default of None in the reference.
        plan_default: default of ``plan-splits``, with the values that a search tries; "" if it is the same.
        off: names of the flags that switch it off; None stands for ``--no-NAME``.
        argument: whether it is an argument of a command, without a flag.
        is_required: whether an argument must be typed.
        warning: the only effect of an option of the public application: a message, printed once; "" for all others.
    """

    name: str
    default: Any
    help: str
    panel: str
    kind: ValueKind
    optional: bool = False
    aliases: Tuple[str, ...] = ()
    synonyms: str = ""
    within: Range = NO_BOUNDS
    choices: Tuple[str, ...] = ()
    metavar: str = ""
    commands: Tuple[str, ...] = ()
    effect: Optional[Effect] = None
    host_effect: bool = True
    ipu_effect: bool = True
    updates_only: bool = False
    keras_effect: bool = True
    in_yaml: bool = True
    default_text: str = ""
    plan_default: str = ""
    off: Optional[Tuple[str, ...]] = None
    argument: bool = False
    is_required: bool = False
    warning: str = ""

    def __post_init__(self) -> None:
        if not (self.host_effect or self.ipu_effect):
            raise TypeError(f"the option {self.name} has an effect neither on the host nor on IPUs")
        if self.commands and self.effect is None:
            raise TypeError(f"the option {self.name} declares no effect, see config/spec.py")
        if self.kind.is_number and not self.within.is_closed:
            raise TypeError(f"the option {self.name} is a number: declare its bounds, see config/bounds.py")
        if not self.metavar:
            object.__setattr__(self, "metavar", "|".join(self.choices) or self.kind.metavar)

    @property
    def decides_result(self) -> bool:
        """Whether the processes of a run need the same value of it, and so do two runs that are to be equal."""
        return self.effect in (Effect.RESULT, Effect.START, Effect.END)

    @property
    def is_bool(self) -> bool:
        """Whether it is switched on and off, with ``--x`` and ``--no-x``."""
        return self.kind is KINDS[bool]

    @property
    def off_flags(self) -> Tuple[str, ...]:
        """The flags that switch it off."""
        return tuple("--" + name for name in ((f"no-{self.key}",) if self.off is None else self.off))

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
        if not self.kind.is_split:
            return tuple(map(self._convert_one, value if isinstance(value, (list, tuple)) else [value]))
        items = values.split_list(value)
        if len(items) > bounds.MAX_VALUES:
            raise values.BadValue(
                f"has {len(items):,} values", hint=f"give at most {bounds.MAX_VALUES:,} values"
            )
        try:
            return tuple(map(self._convert_one, items))
        except values.BadValue as bad:
            nearest = [*map(self._nearest, items)]
            raise values.BadValue(
                bad.reason, None if None in nearest else " ".join(map(str, nearest)), bad.hint
            ) from None

    def _nearest(self, item: object) -> Optional[str]:
        """Returns one value of a list, or the nearest legal one as the user would type it; None if there is none."""
        try:
            self._convert_one(item)
        except values.BadValue as bad:
            return bad.nearest
        return str(item)

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
    except UserError as error:  # of a path
        raise type(error)(f"{where}{shown} {error.message}", error.hint) from None
    except values.BadValue as bad:
        written = shown if shown.startswith("--") else f"{shown}:"
        if isinstance(value, (list, tuple)) and len(value) <= bounds.MAX_VALUES:
            is_list = spec.kind.is_list
            value = (
                " ".join(map(shown_value, value)) if is_list else f"[{', '.join(map(shown_value, value))}]"
            )
        raise ConfigurationError(
            f"{where}{written} {shown_value(value)}: {bad.reason}",
            bad.advice(written) or _example(spec, written),
        ) from None


def check_paths(spec: OptionSpec, value: object, shown: str) -> None:
    """Checks that the paths of an option can be looked up; they need not exist.

    Raises:
        UserError: the message has the option as written and the reason.
    """
    if not spec.kind.is_path or value is None:
        return
    for path in value if isinstance(value, tuple) else (value,):
        try:
            check_possible(path if isinstance(path, Path) else expand_user(path))
        except UserError as error:
            raise type(error)(f"{shown} {error.message}", error.hint) from None


def _example(spec: OptionSpec, written: str) -> str:
    """Returns a hint with a value to type, or with the option's help if its value may be any text."""
    if spec.choices or spec.kind.example:
        return f"for example {written} {spec.choices[0] if spec.choices else spec.kind.example}"
    if not spec.kind.is_number:
        of_help = re.search(r"e\.g\. ('.+?')", spec.help)
        return (
            f"for example {written} {of_help[1]}" if of_help else f"{spec.flag} {spec.metavar}: {spec.help}"
        )
    least, most = spec.within.minimum, spec.within.maximum
    if least is None or most is None:
        return f"for example {written} 0.1"
    limits = " to ".join(map(values.plain_number, (least, most)))
    what = "a whole number" if spec.kind.metavar.startswith("INT") else "a number"
    return (
        f"give {what} from {limits}, for example {written} {values.plain_number(min(max(10, least), most))}"
    )


def option(default: object, help: str, **details: Any) -> Any:
    """Declares one option as a dataclass field; ``details`` are the further fields of :class:`OptionSpec`."""
    metadata = {METADATA_KEY: dict(details, help=help)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def argument(
    metavar: str,
    help: str,
    default: Union[PlainValue, Path] = "",
    required: bool = False,
    kind: Optional[ValueKind] = None,
) -> Any:
    """Declares an argument of a command, as a field of its class.

    Args:
        metavar: its name in the usage; ``NAME...`` takes several words.
        help: its help.
        default: the value if it is not typed.
        required: whether it must be typed.
        kind: kind of its values; None: texts.
    """
    kind = kind or (WORDS if metavar.rstrip("]").endswith("...") else WORD)
    return option(default, help, metavar=metavar, kind=kind, argument=True, is_required=required)


def word(metavar: str, help: str, **details: PlainValue) -> Any:
    """Declares an option of a command that takes any text; it is None if it was not typed."""
    return option(None, help, metavar=metavar, kind=WORD, **details)


def words(metavar: str, help: str, kind: ValueKind = WORDS, **details: PlainValue) -> Any:
    """Declares an option of a command that takes several texts, or values of another kind."""
    return option((), help, metavar=metavar, kind=kind, **details)


def specs_of(panel: Type[Any]) -> List[OptionSpec]:
    """Returns the specifications of a panel, in order; fields that :func:`option` did not make are left out.

    Args:
        panel: a dataclass with the title ``PANEL``; its ``EACH`` has details that all fields share.
    """
    specs = []
    for field in dataclasses.fields(panel):
        if METADATA_KEY not in field.metadata:
            continue
        details = {
            "panel": panel.PANEL,
            **getattr(panel, "EACH", {}),
            **field.metadata[METADATA_KEY],
        }
        known = next((known for known in KINDS if field.type == Optional[known]), None)
        if "kind" not in details:
            details["kind"] = KINDS[known or field.type]
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        details.setdefault("optional", known is not None)
        specs.append(OptionSpec(field.name, default, **details))
    return specs
