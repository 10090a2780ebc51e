"""Translates errors of the Poplar SDK's TensorFlow, recognised by class and text, into errors with hints.

Every Poplar error that the driver catches arrives as an InternalError "[Poplar][<phase>] <type>: <text>"
(driver/tools/poplar_util.cc of graphcore/tensorflow r2.6, SDK 3.4, the source of the other texts, too).  TensorFlow is
not imported: classes are compared by name.
"""

import contextlib
import re
from dataclasses import dataclass
from typing import Callable, Dict, Iterator, NamedTuple, Optional, Sequence, Tuple, Type, Union

from ipucnn.aliases import MemoryAdvice
from ipucnn.errors import ConfigurationError, DataError, InfeasibleError, MissingError, UserError

_DOCTOR = "ipucnn doctor --device ipu says what is here"


@dataclass
class ErrorContext:
    """Facts of the run that make hints better.

    Attributes:
        training: the pipeline's depth is the gradient accumulation count; otherwise it is the steps per execution.
        num_ipus: IPUs that the program asked for; 0: unknown.
        fp_exceptions: floating-point exceptions are switched on.
        would_fit: predicts which change would fit, see ``planning.search.variations``; called only if memory ran out or
            remote memory is missing.
        kept_remotely: active options of :data:`REMOTE_MEMORY`.
    """

    training: bool = True
    num_ipus: int = 0
    fp_exceptions: bool = False
    would_fit: Optional[MemoryAdvice] = None
    kept_remotely: Sequence[str] = ()


@dataclass(frozen=True)
class Match:
    """A match of a case's pattern.

    Attributes:
        groups: named groups of the pattern.
        text: the whole message.
        rest: the rest of the line after the match, in Poplar's words.
    """

    groups: Dict[str, str]
    text: str
    rest: str


_Make = Callable[[Match, ErrorContext], UserError]


class Case(NamedTuple):
    """One known error.

    Attributes:
        classes: names of exception classes, base classes included; empty for text on stderr before the process aborts.
        pattern: regular expression to search for.
        answer: a function that makes the error; or its class, message and hint, with groups of the pattern in braces.
    """

    classes: Tuple[str, ...]
    pattern: str
    answer: Union[_Make, Tuple[Type[UserError], str, str]]

    def error(self, match: Match, context: ErrorContext) -> UserError:
        """The error for the user."""
        if callable(self.answer):
            return self.answer(match, context)
        kind, message, hint = self.answer
        return kind(message.format(**match.groups), hint.format(**match.groups))


_INTERNAL = ("InternalError", "UnknownError")
# The sources report memory as InternalError; a build that reports ResourceExhaustedError must not end in a traceback.
_MEMORY = (*_INTERNAL, "ResourceExhaustedError")


def _out_of_memory(match: Match, context: ErrorContext) -> UserError:
    overuse = None
    message = "the program does not fit in the memory of an IPU"
    overrun = re.search(r"on tile (\d+): (\d+) bytes used but tiles only have (\d+) bytes", match.text)
    if overrun is not None:
        tile, used, limit = (int(number) for number in overrun.groups())
        overuse = used / limit
        message += f": tile {tile} needs {used:,} bytes and has {limit:,}"
    hint = context.would_fit(overuse) if context.would_fit is not None else None
    return InfeasibleError(
        message,
        hint
        or "use a smaller --micro-batch-size, --recomputation or more stages; `ipucnn plan-splits MODEL` says "
        "what is predicted to fit",
    )


def _invalid_option(match: Match, context: ErrorContext) -> UserError:
    return ConfigurationError(
        f"Poplar refuses an option: {match.rest or 'its message names none'}",
        "correct --available-memory-proportion, the other options of the IPU, or POPLAR_ENGINE_OPTIONS",
    )


def _depth(match: Match, context: ErrorContext) -> UserError:
    option, name = ("--gradient-accumulation-count", "accumulated micro-batches")
    if not context.training:
        option, name = "--steps-per-execution", "micro-batches of an execution"
    if "base" not in match.groups:
        return ConfigurationError(
            "the number of micro-batches does not fill the pipeline a whole number of times",
            f"make {option} a multiple of twice the number of stages",
        )
    base, given = int(match.groups["base"]), match.groups.get("given")
    count = f"{given} {name}" if given else f"the {name}"
    if match.groups["kind"] == "at least":
        return ConfigurationError(
            f"{count} are too few for the pipeline, which needs {base}", f"{option} {base}"
        )
    legal = sorted({max(base, int(given or 0) // base * base), -(-int(given or 0) // base) * base} - {0})
    return ConfigurationError(
        f"{count} are not a multiple of the {base} that the pipeline needs",
        f"use {option} {' or '.join(map(str, legal))}",
    )


def _device_exception(match: Match, context: ErrorContext) -> UserError:
    message = "the program on the IPU stopped with an exception"
    message += f": {match.rest}" if match.rest else ""
    if context.fp_exceptions:
        return ConfigurationError(
            message,
            "with --fp-exceptions it stops at the first value that is not finite: lower --loss-scaling "
            "or the learning rate",
        )
    return ConfigurationError(
        message,
        "an index out of range (a label that is no class) does this; the IPU is reset before the next run",
    )


_RESETS = {
    "IPU_RESET": "run it again: the IPU is reset first; if it comes back, run gc-reset",
    "LINK_RESET": "reset the links (gc-reset), or the partition: vipu reset partition NAME",
    "PARTITION_RESET": "reset the partition: vipu reset partition NAME",
    "FULL_RESET": "the machine has to be power-cycled: tell its administrator",
}


def _hardware_fault(match: Match, context: ErrorContext) -> UserError:
    action = match.groups["action"]
    return MissingError(
        f"the IPUs or their links failed, and ask for {action}",
        f"{_RESETS[action]}; `ipucnn train --resume` goes on from the last checkpoint",
    )


def _no_match(match: Match, context: ErrorContext) -> UserError:
    size = f" of {context.num_ipus} IPUs" if context.num_ipus else ""
    return MissingError(f"no device{size} matches what was asked for", _DOCTOR)


def _busy(match: Match, context: ErrorContext) -> UserError:
    size = f"{context.num_ipus} IPUs" if context.num_ipus else "IPUs"
    return MissingError(
        f"no free device of {size}: others use them",
        "gc-monitor shows who does; wait, or use --on-demand, which waits for them",
    )


def _unsupported(match: Match, context: ErrorContext) -> UserError:
    operations = list(dict.fromkeys(re.findall(r"(\w+) \(No registered", match.text)))
    named = f" {', '.join(operations)}" if operations else ""
    return ConfigurationError(
        f"IPUs do not know all of the TensorFlow operations{named}",
        "use another layer or optimizer, or do this on the host: --device cpu",
    )


# Options that need remote memory: what they keep there, and the change that avoids it.  Offloading that is not given
# is not among them, because in a pipeline that means no offloading.
REMOTE_MEMORY = {
    "optimizer_state_offloading": ("the optimizer's state was", "add --no-optimizer-state-offloading"),
    "offload_activations": ("activations were", "drop --offload-activations"),
    "offload_gradient_accumulation_buffers": (
        "accumulated gradients were",
        "drop --offload-gradient-accumulation-buffers",
    ),
}


def no_remote_memory(option: str, would_fit: Optional[MemoryAdvice]) -> ConfigurationError:
    """The error for an option that needs remote memory on IPUs that have none."""
    what, change = REMOTE_MEMORY[option]
    held = would_fit(None, without=option) if would_fit is not None else None
    return ConfigurationError(
        f"these IPUs have no remote memory, where {what} to be kept",
        f"{change}: {held}" if held else f"{change}; `ipucnn plan-splits` says what the IPUs then hold",
    )


def _needs_remote_memory(option: str) -> _Make:
    return lambda match, context: no_remote_memory(option, context.would_fit)


def _not_loaded(match: Match, context: ErrorContext) -> UserError:
    """Loading fails for several reasons with Poplar's own texts; only missing remote memory can be named here."""
    changes = ", ".join(REMOTE_MEMORY[option][1] for option in context.kept_remotely)
    hint = f"if `gc-info --device-id 0 --device-info` says 'remote buffers supported: 0', {changes}"
    return MissingError(
        "Poplar could not load the program onto the IPUs" + (f": {match.rest}" if match.rest else ""),
        hint if changes else _DOCTOR,
    )


_not_enabled = (
    MissingError,
    "the Poplar SDK is not enabled in this shell: {what} is not found",
    "type: source PATH/TO/poplar_sdk-*/enable",
)
_IMPORT = ("ImportError", "OSError")

# In order: the first match counts.
CASES: Tuple[Case, ...] = (
    # The most serious first, because a message may quote another.
    Case(_MEMORY, r"\[Poplar\]\[[^\]]*\]\s*graph_memory_allocation_error", _out_of_memory),
    Case(
        _MEMORY,
        r"Out of memory on tile \d+: \d+ bytes used but tiles only have \d+ bytes of memory"
        r"|Out of memory: Cannot fit all variable data onto one or more tiles",
        _out_of_memory,
    ),
    Case(_INTERNAL, r"\[Poplar\].*invalid_option:?", _invalid_option),
    Case(_INTERNAL, r"Pipeline depth is invalid", _depth),
    Case(
        _INTERNAL,
        r"\[Poplar\]\[Execute engine\] application_runtime_error:( \[Recovery action: IPU_RESET\])?",
        _device_exception,
    ),
    Case(
        _INTERNAL,
        r"recoverable_runtime_error: \[Recovery action: "
        r"(?P<action>IPU_RESET|LINK_RESET|PARTITION_RESET|FULL_RESET)\]",
        _hardware_fault,
    ),
    Case(
        ("InvalidArgumentError",),
        r"Target configuration failed: model disabled and no hardware IPU found",
        (MissingError, "no IPU is visible to this process", _DOCTOR),
    ),
    Case(
        ("FailedPreconditionError",),
        r"Unsupported number of IPUs requested - could not find an IPU device with (?P<ipus>\d+) IPUs",
        (
            MissingError,
            "there is no device of {ipus} IPUs here",
            "use fewer replicas (evaluate: --validation-num-replicas) or stages, or a larger partition; "
            + _DOCTOR,
        ),
    ),
    # FailedPrecondition of variables_offload_and_partition.cc, pipeline_fifo_inserter.cc and
    # gradient_accumulation_buffers_offload.cc, for IPUs that are attached before the program is compiled.
    Case(
        ("FailedPreconditionError",),
        r"does not support remote memory and therefore weight update only variables",
        _needs_remote_memory("optimizer_state_offloading"),
    ),
    Case(
        ("FailedPreconditionError",),
        r"Activations? offloading has been enabled, however the current configuration",
        _needs_remote_memory("offload_activations"),
    ),
    Case(
        ("FailedPreconditionError",),
        r"Gradient accumulation buffer offloading has been enabled, however",
        _needs_remote_memory("offload_gradient_accumulation_buffers"),
    ),
    Case(_INTERNAL, r"\[Poplar\]\[Load engine\]", _not_loaded),
    Case(("InternalError",), r"Could not find an available device for TensorFlow virtual device", _busy),
    Case(
        ("InternalError",),
        r"Timed out trying to find an available device",
        (
            MissingError,
            "no IPUs became free in the time that --on-demand waits",
            "gc-monitor shows who uses them; TF_POPLAR_FLAGS=--on_demand_device_timeout=MILLISECONDS waits longer",
        ),
    ),
    Case(("InvalidArgumentError",), r"No device matches the requested configuration", _no_match),
    Case(
        ("InternalError",),
        r"Unable to open Poplar device",
        (MissingError, "the IPU driver cannot be opened", f"is its service running? {_DOCTOR}"),
    ),
    Case(
        ("FailedPreconditionError",),
        r"'executable_cache_path' in 'TF_POPLAR_FLAGS' has not been set",
        (
            ConfigurationError,
            "compiling without IPUs needs a folder for what is compiled",
            "export TF_POPLAR_FLAGS=--executable_cache_path=FOLDER",
        ),
    ),
    Case(
        ("FailedPreconditionError",),
        r"The number of iterations of the pipeline must be (?P<kind>a multiple of|at least) (?P<base>\d+)"
        r"(, but it is (?P<given>\d+))?",
        _depth,
    ),
    Case(
        ("InternalError",),
        r"Trying to compile a graph for an IPU device with (?P<ipus>\d+) IPUs and (?P<shards>\d+) shards",
        (
            ConfigurationError,
            "a device of {ipus} IPUs cannot be divided into replicas of {shards}",
            "use a number of IPUs that is a multiple of {shards}: --num-replicas",
        ),
    ),
    Case(
        ("InternalError",),
        r"must be divisible by distributed_batch_norm_replica_group_size",
        (
            ConfigurationError,
            "--dbn-replica-group-size does not divide the number of replicas",
            "use a divisor of --num-replicas, or 1",
        ),
    ),
    Case(
        ("FailedPreconditionError",),
        r"Unsupported datatype (?P<dtype>\w+) on index (?P<index>\d+) of feed operation",
        (
            DataError,
            "IPUs take no {dtype} data (component {index} of the data set)",
            "the types they take are int32, float32, float16, bool, int8 and uint8",
        ),
    ),
    Case(
        ("FailedPreconditionError",),
        r"Detected a NaN constant instruction",
        (
            ConfigurationError,
            "the network has a constant that is not a number",
            "look for it in the weights or the data that it starts from; TF_POPLAR_FLAGS=--allow_nans lets it pass",
        ),
    ),
    # XLA's text (tf2xla/xla_compiler.cc); the CPU's differs in the device's name.
    Case(
        ("InvalidArgumentError", "UnimplementedError"),
        r"[Dd]etected unsupported operations when trying to compile graph .* on XLA_IPU",
        _unsupported,
    ),
    Case(
        _IMPORT,
        r"(?P<what>lib(?:pop|gcl|gcipuinfo|pva|pvti)[\w.+-]*): cannot open shared object file",
        _not_enabled,
    ),
    Case(("ImportError",), r"No module named '(?P<what>popdist|libpvti|popef|popart|poplar)\b", _not_enabled),
    Case(
        ("ImportError",),
        r"(?:No module named '|cannot import name ')"
        r"(?P<what>tensorflow\.python\.ipu|tensorflow\.compiler\.plugin\.poplar|keras\.ipu|ipu_tensorflow_addons|ipu\b)",
        (
            MissingError,
            "this is not the Poplar SDK's TensorFlow and Keras: {what} is missing",
            "install the SDK's tensorflow, keras and ipu_tensorflow_addons wheels (docs/ipu.md)",
        ),
    ),
    Case(
        ("ImportError", "RuntimeError", "ValueError", "AttributeError"),
        r"module compiled against (?:API|ABI) version 0x\w+ but this version of numpy is"
        r"|numpy\.\w+ size changed, may indicate binary incompatibility"
        r"|numpy\.core\.\w+ failed to import"
        r"|module 'numpy' has no attribute '(?:bool|int|float|object|str|typeDict|complex)'",
        (
            MissingError,
            "this NumPy is not the one that the Poplar SDK's TensorFlow was built with",
            "python -m pip install 'numpy==1.19.5'",
        ),
    ),
    Case(
        _IMPORT,
        r"Python version mismatch: module was compiled for Python 3\.8, but the interpreter version is"
        r"|undefined symbol: _?Py\w+",
        (
            MissingError,
            "the Poplar SDK's TensorFlow is built for Python 3.8, and this is another Python",
            "make the environment with it: python3.8 -m venv ENV (docs/ipu.md)",
        ),
    ),
    # The following errors end the process with SIGABRT and a line on stderr.
    Case(
        (),
        r"An infeed dataset iterator has failed with status|Infeed dataset iterator out of range",
        (
            DataError,
            "the data set failed or ended while the IPUs were running, which ends the process",
            "`ipucnn train --device cpu` shows the error itself",
        ),
    ),
)


def recognise(text: str, classes: Tuple[str, ...]) -> Optional[Tuple[Case, Match]]:
    """Finds the case of a message.

    Args:
        text: text of the exception, or of stderr.
        classes: names of the exception's class and its bases; empty for stderr, which may hold any case.
    """
    for case in CASES:
        if classes and not set(classes) & set(case.classes):
            continue
        hit = re.search(case.pattern, text)
        if hit is not None:
            groups = {key: value for key, value in hit.groupdict().items() if value is not None}
            rest = text[hit.end() :].lstrip(" :").partition("\n")[0].strip()
            return case, Match(groups, text, rest)
    return None


def translate(exception: BaseException, context: Optional[ErrorContext] = None) -> Optional[UserError]:
    """The error for the user, or None if the exception is unknown (a bug, or an error of other code).

    Args:
        exception: from the SDK's TensorFlow; AutoGraph's "in user code:" around the text does not matter.
        context: facts for better hints.
    """
    if isinstance(exception, UserError):
        return None
    classes = tuple(
        c.__name__ for c in type(exception).__mro__ if c not in (object, BaseException, Exception)
    )
    recognised = recognise(str(exception), classes)
    if recognised is None:
        return None
    case, match = recognised
    return case.error(match, context or ErrorContext())


def translate_output(stderr: str) -> Optional[UserError]:
    """The error for the user from the stderr of a process that aborted, or None."""
    recognised = recognise(stderr, ())
    return None if recognised is None else recognised[0].error(recognised[1], ErrorContext())


@contextlib.contextmanager
def poplar_errors(context: Optional[ErrorContext] = None) -> Iterator[None]:
    """Translates known errors of the SDK in its body; others pass unchanged.

    Raises:
        UserError: with the SDK's exception as its cause.
    """
    try:
        yield
    except Exception as exception:
        error = translate(exception, context)
        if error is None:
            raise
        raise error from exception
