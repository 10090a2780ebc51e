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
    """A preset, which the user named or the network has."""
    RUN = 4
    """The configuration of a saved run."""
    PLAN = 5
    """The file of ``--plan``."""
    TYPED = 6
    """The command line, or a keyword of the Python interface."""


@dataclass(frozen=True)
class Origin:
    """Who gave a value.

    Attributes:
        giver: the kind of giver.
        text: its name, as ``--print-config`` shows it.
    """

    giver: Giver
    text: str

    def is_given(self, by: Giver = Giver.PUBLIC) -> bool:
        """Returns whether the value was given at all, or ``by`` this giver or one that overrides it."""
        return self.giver >= by

    def __str__(self) -> str:
        return self.text


DEFAULT = Origin(Giver.DEFAULT, "default")
PUBLIC = Origin(Giver.PUBLIC, "public default")
RUN = Origin(Giver.RUN, "run")
TYPED = Origin(Giver.TYPED, "flag")
OWN_NETWORK = Origin(Giver.IMPLIED, "own network")
"""Of a micro-batch that nobody chose for a user's own network; it is smaller for a smaller data set."""


def implied(by: str) -> Origin:
    """Returns the origin of a value that follows from ``by``."""
    return Origin(Giver.IMPLIED, by)


def of_preset(name: str) -> Origin:
    """Returns the origin of a value in a preset."""
    return Origin(Giver.PRESET, f"preset {name}")


def of_plan(file: str) -> Origin:
    """Returns the origin of a value in the file of ``--plan``."""
    return Origin(Giver.PLAN, f"plan {file}")


Origins = Mapping[str, Origin]
"""Field name -> origin of its value."""
