"""Who gave the value of an option: the user, a file, a preset, a run, or nobody."""

import enum
from dataclasses import dataclass
from typing import Mapping


class Giver(enum.IntEnum):
    """Who gives values, in the order in which they override each other."""

    DEFAULT = 0
    """Nobody: the value is the declared default."""
    IMPLIED = 1
    """Nobody: the value follows from another option or from the network."""
    PUBLIC = 2
    """Graphcore's public application, for an option that a configuration in its layout does not name."""
    PRESET = 3
    """The built-in preset of the network, which nobody named."""
    RUN = 4
    """The configuration of a saved run."""
    CROSS_VALIDATION = 5
    """The cross-validation, for each of its folds."""
    NAMED = 6
    """A preset or a file that the user named, with ``--config`` or ``--config-path``."""
    PLAN = 7
    """The file of ``--plan``."""
    TYPED = 8
    """The command line, or a keyword of the Python interface."""


@dataclass(frozen=True)
class Origin:
    """Who gave a value.

    Attributes:
        giver: the kind of giver.
        text: its name, as ``--print-config`` shows it.
        named_with: the flags with which the user named a preset, a file or a plan.
    """

    giver: Giver
    text: str
    named_with: str = ""

    @property
    def is_given(self) -> bool:
        """Whether anybody gave the value: it is no default, and does not follow from another."""
        return self.giver >= Giver.PUBLIC

    @property
    def overrides_run(self) -> bool:
        """Whether the value is asked of a run that continues, which must not contradict it."""
        return self.giver > Giver.RUN

    @property
    def by_user(self) -> bool:
        """Whether the user gave the value: on the command line, or in a preset, a file or a plan that it names."""
        return self.giver >= Giver.NAMED

    @property
    def is_typed(self) -> bool:
        """Whether the value is on the command line itself, so that a hint can say to drop its flag."""
        return self.giver is Giver.TYPED

    def option(self, flag: str, value: str = "") -> str:
        """Returns an option as messages name it: with its flag if that was typed, else with its giver."""
        written = f"{flag} {value}".rstrip()
        return written if self.is_typed else f"{written[2:]} ({self.text})"

    def __str__(self) -> str:
        return self.text


DEFAULT = Origin(Giver.DEFAULT, "default")
PUBLIC = Origin(Giver.PUBLIC, "public default")
RUN = Origin(Giver.RUN, "run")
CROSS_VALIDATION = Origin(Giver.CROSS_VALIDATION, "cross-validation")
TYPED = Origin(Giver.TYPED, "flag")
NETWORK = Origin(Giver.IMPLIED, "network")
"""Of a value that is the network's own: its default data set, or its norm."""
OWN_NETWORK = Origin(Giver.IMPLIED, "own network")
"""Of a micro-batch that nobody chose for a user's own network; it is smaller for a smaller data set."""


def implied(by: str) -> Origin:
    """Returns the origin of a value that follows from ``by``."""
    return Origin(Giver.IMPLIED, by)


def of_preset(name: str, named_with: str = "") -> Origin:
    """Returns the origin of a value in a preset.

    Args:
        name: the preset's name.
        named_with: the flags with which the user named it; "" for the network's own preset.
    """
    return Origin(Giver.NAMED if named_with else Giver.PRESET, f"preset {name}", named_with)


def of_plan(file: str) -> Origin:
    """Returns the origin of a value in the file of ``--plan``."""
    return Origin(Giver.PLAN, f"plan {file}", "--plan")


Origins = Mapping[str, Origin]
"""Field name -> origin of its value.  What else asks who gave a value asks the value's origin."""
