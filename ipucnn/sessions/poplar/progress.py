"""The driver's progress bar, read: how long which stage of compiling took.

Its lines, from ``driver/tools/progress_bar.cc`` of graphcore/tensorflow r2.6: "Compiling module NAME:", then updates
of "[####   ] 42% Step: Graph Compilation [Elapsed: 00:01:12.3]" that overwrite each other.  A program that
comes from the executable cache prints nothing.
"""

import re
from dataclasses import dataclass, field
from typing import Dict, List

_START = re.compile(r"^Compiling module (?P<module>.+):$")
_UPDATE = re.compile(
    r"\[[# ]{50}\] (?P<percent>\d{1,3})% (?:Step: )?(?P<stage>[A-Za-z-]+(?: [A-Za-z-]+)*) "
    r"\[Elapsed: (?P<h>\d{2,}):(?P<m>\d{2}):(?P<s>\d{2})\.(?P<d>\d)\]"
)
FINISHED = "Compilation Finished"


@dataclass
class CompiledModule:
    """One program: seconds in each stage, in order; ``finished`` if the bar reached its end."""

    name: str
    stages_s: Dict[str, float] = field(default_factory=dict)
    total_s: float = 0.0
    finished: bool = False


def parse_progress(text: str) -> List[CompiledModule]:
    """The programs that a text of the driver tells of; other lines are passed over.

    A stage lasts from its first update to the first one of the next.
    """
    modules: List[CompiledModule] = []
    stage, began_s = "", 0.0
    for line in re.split(r"[\r\n]+", text):
        start = _START.match(line.strip())
        if start is not None:
            modules.append(CompiledModule(start.group("module")))
            stage, began_s = "", 0.0
            continue
        update = _UPDATE.search(line)
        if update is None or not modules:
            continue
        module = modules[-1]
        hours, minutes, seconds, tenths = (int(update.group(k)) for k in "hmsd")
        now_s = 3600 * hours + 60 * minutes + seconds + tenths / 10
        if update.group("stage") != stage:
            if stage:
                module.stages_s[stage] = module.stages_s.get(stage, 0.0) + now_s - began_s
            stage, began_s = update.group("stage"), now_s if stage else 0.0
        module.total_s = now_s
        if stage == FINISHED:
            module.finished = True
        else:
            module.stages_s.setdefault(stage, 0.0)
    for module in modules:
        # The last stage of a program that did not finish ends with its last update.
        if not module.finished and module.stages_s:
            last = list(module.stages_s)[-1]
            module.stages_s[last] = module.total_s - sum(v for k, v in module.stages_s.items() if k != last)
        module.stages_s.pop(FINISHED, None)
    return modules
