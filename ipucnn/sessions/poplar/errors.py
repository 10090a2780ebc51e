"""Translates errors of the Poplar SDK's TensorFlow, recognised by class and text, into errors with hints.

Every Poplar error that the driver catches arrives as an InternalError "[Poplar][<phase>] <type>: <text>"
(driver/tools/poplar_util.cc of graphcore/tensorflow r2.6, SDK 3.4, the source of the other texts, too).  TensorFlow is
not imported: classes are compared by name.
"""

import contextlib
import re
from dataclasses import dataclass
from typing import Callable, Iterator, Match, NamedTuple, Optional, Sequence, Set, Tuple, Type

from ipucnn.aliases import MemoryAdvice
from ipucnn.errors import ConfigurationError, DataError, InfeasibleError, MissingError, UserError
from ipucnn.training.batching import alternatives, nearest_multiples

_DOCTOR = "ipucnn doctor --device ipu says what is here"


@dataclass(frozen=True)
class ErrorContext:
    """Facts of the run that make hints better.

    Attributes:
        training: whether the pipeline's depth is the gradient accumulation count; otherwise the steps per execution.
        num_ipus: the IPUs that the program needs; 0: unknown.
        fp_exceptions: whether floating-point exceptions are switched on.
        memory_advice: the function that predicts which change would fit, see ``planning.search.neighbours``; called
            only if memory ran out or remote memory is missing.
        kept_remotely: the active options of :data:`REMOTE_MEMORY`.
    """

    training: bool = True
    num_ipus: int = 0
    fp_exceptions: bool = False
    memory_advice: Optional[MemoryAdvice] = None
    kept_remotely: Sequence[str] = ()

    @property
    def depth_option(self) -> str:
        """Returns the option that sets the pipeline's depth."""
        return "--gradient-accumulation-count" if self.training else "--steps-per-execution"


_Answer = Callable[[Match[str], ErrorContext], UserError]


class Case(NamedTuple):
    """One known error.

    Attributes:
        classes: the names of exception classes, base classes included; empty for text on stderr before an abort.
        pattern: the regular expression to search for.
        answer: (match, context) -> the error for the user.
    """

    classes: Tuple[str, ...]
    pattern: str
    answer: _Answer


def _row(classes: Tuple[str, ...], pattern: str, kind: Type[UserError], message: str, hint: str) -> Case:
    """Returns a case whose message and hint are texts with values in braces.

    These are the groups of the pattern, ``rest`` (": " and the rest of the line), ``size`` (" of 4 IPUs", if the number
    is known), ``option`` (the one of the pipeline's depth) and ``reset`` (what to do for the group ``action``).
    """

    def answer(match: Match[str], context: ErrorContext) -> UserError:
        groups = match.groupdict()
        groups.update(rest=_rest(match), option=context.depth_option)
        groups.update(size=f" of {context.num_ipus} IPUs" if context.num_ipus else "")
        groups.update(reset=_RESETS.get(groups.get("action", ""), ""))
        return kind(message.format(**groups), hint.format(**groups))

    return Case(classes, pattern, answer)


def _rest(match: Match[str]) -> str:
    """Returns the rest of the line after the match, in Poplar's words, after a colon; "" if there is none."""
    rest = match.string[match.end() :].lstrip(" :").partition("\n")[0].strip()
    return f": {rest}" if rest else ""


_INTERNAL = ("InternalError", "UnknownError")
# The sources report memory as InternalError; a build that reports ResourceExhaustedError must not end in a traceback.
_MEMORY = (*_INTERNAL, "ResourceExhaustedError")


def _out_of_memory(match: Match[str], context: ErrorContext) -> UserError:
    overuse = None
    message = "the program does not fit in the memory of an IPU"
    overrun = re.search(r"on tile (\d+): (\d+) bytes used but tiles only have (\d+) bytes", match.string)
    if overrun is not None:
        tile, used, limit = (int(number) for number in overrun.groups())
        overuse = used / limit
        message += f": tile {tile} needs {used:,} bytes and has {limit:,}"
    hint = context.memory_advice(overuse) if context.memory_advice is not None else None
    return InfeasibleError(
        message,
        hint
        or "use a smaller --micro-batch-size, --recomputation or more stages; `ipucnn plan-splits MODEL` says "
        "what is predicted to fit",
    )


def _depth(match: Match[str], context: ErrorContext) -> UserError:
    option = context.depth_option
    name = "accumulated micro-batches" if context.training else "micro-batches of an execution"
    base, given = int(match["base"]), match["given"]
    count = f"{given} {name}" if given else f"the {name}"
    if match["kind"] == "at least":
        return ConfigurationError(
            f"{count} are too few for the pipeline, which needs {base}", f"{option} {base}"
        )
    return ConfigurationError(
        f"{count} are not a multiple of the {base} that the pipeline needs",
        f"use {option} {alternatives(nearest_multiples(int(given or 0), base))}",
    )


def _device_exception(match: Match[str], context: ErrorContext) -> UserError:
    hint = "an index out of range (a label that is no class) does this; the IPU is reset before the next run"
    if context.fp_exceptions:
        hint = (
            "with --fp-exceptions it stops at the first value that is not finite: lower --loss-scaling "
            "or the learning rate"
        )
    return ConfigurationError(f"the program on the IPU stopped with an exception{_rest(match)}", hint)


_RESETS = {
    "IPU_RESET": "run it again: the IPU is reset first; if it comes back, run gc-reset",
    "LINK_RESET": "reset the links (gc-reset), or the partition: vipu reset partition NAME",
    "PARTITION_RESET": "reset the partition: vipu reset partition NAME",
    "FULL_RESET": "the machine has to be power-cycled: tell its administrator",
}


def _unsupported(match: Match[str], context: ErrorContext) -> UserError:
    operations = list(dict.fromkeys(re.findall(r"(\w+) \(No registered", match.string)))
    named = f" {', '.join(operations)}" if operations else ""
    return ConfigurationError(
        f"IPUs do not know all of the TensorFlow operations{named}",
        "use another layer or optimizer, or do this on the host: --device cpu",
    )


# Options that need remote memory: what they keep there, and the change that avoids it.  Offloading that is not given
# is not among them, because in a pipeline that means no offloading.
REMOTE_MEMORY = {
    "optimizer_state_offloading": ("the optimizer's state was", "add --no-optimizer-state-offloading"),
    "offload_activations": ("activations were", "add --no-offload-activations"),
    "offload_gradient_accumulation_buffers": (
        "accumulated gradients were",
        "add --no-offload-gradient-accumulation-buffers",
    ),
}


def no_remote_memory(option: str, memory_advice: Optional[MemoryAdvice]) -> ConfigurationError:
    """Returns the error for an option that needs remote memory on IPUs that have none."""
    what, change = REMOTE_MEMORY[option]
    held = memory_advice(None, without=option) if memory_advice is not None else None
    return ConfigurationError(
        f"these IPUs have no remote memory, where {what} to be kept",
        f"{change}: {held}" if held else f"{change}; `ipucnn plan-splits` says what the IPUs then hold",
    )


def _remote_memory(option: str, pattern: str) -> Case:
    """Returns a case of FailedPrecondition for IPUs that are attached before the program is compiled.

    It is raised in variables_offload_and_partition.cc, pipeline_fifo_inserter.cc or
    gradient_accumulation_buffers_offload.cc.
    """
    answer: _Answer = lambda match, context: no_remote_memory(option, context.memory_advice)  # noqa: E731
    return Case(_FAILED, pattern, answer)


def _not_loaded(match: Match[str], context: ErrorContext) -> UserError:
    """Returns the error if loading fails; of its reasons, only missing remote memory can be named here."""
    changes = ", ".join(REMOTE_MEMORY[option][1] for option in context.kept_remotely)
    hint = f"if `gc-info --device-id 0 --device-info` says 'remote buffers supported: 0', {changes}"
    return MissingError(
        f"Poplar could not load the program onto the IPUs{_rest(match)}", hint if changes else _DOCTOR
    )


_FAILED, _INVALID = ("FailedPreconditionError",), ("InvalidArgumentError",)
_IMPORT = ("ImportError", "OSError")


def _enable_row(classes: Tuple[str, ...], pattern: str) -> Case:
    """Returns a case for a shell in which the SDK is not enabled; the pattern has the group ``what``."""
    return _row(
        classes,
        pattern,
        MissingError,
        "the Poplar SDK is not enabled in this shell: {what} is not found",
        "type: source PATH/TO/poplar_sdk-*/enable",
    )


# In order: the first match counts.
CASES: Tuple[Case, ...] = (
    # The most serious first, because a message may quote another.
    Case(
        _MEMORY,
        r"\[Poplar\]\[[^\]]*\]\s*graph_memory_allocation_error"
        r"|Out of memory on tile \d+: \d+ bytes used but tiles only have \d+ bytes of memory"
        r"|Out of memory: Cannot fit all variable data onto one or more tiles",
        _out_of_memory,
    ),
    _row(
        _INTERNAL,
        r"\[Poplar\].*invalid_option:?",
        ConfigurationError,
        "Poplar refuses an option{rest}",
        "correct --available-memory-proportion, the other options of the IPU, or POPLAR_ENGINE_OPTIONS",
    ),
    _row(
        _INTERNAL,
        r"Pipeline depth is invalid",
        ConfigurationError,
        "the number of micro-batches does not fill the pipeline a whole number of times",
        "make {option} a multiple of twice the number of stages",
    ),
    Case(
        _INTERNAL,
        r"\[Poplar\]\[Execute engine\] application_runtime_error:( \[Recovery action: IPU_RESET\])?",
        _device_exception,
    ),
    _row(
        _INTERNAL,
        r"recoverable_runtime_error: \[Recovery action: "
        r"(?P<action>IPU_RESET|LINK_RESET|PARTITION_RESET|FULL_RESET)\]",
        MissingError,
        "the IPUs or their links failed, and ask for {action}",
        "{reset}; `ipucnn train --resume` goes on from the last checkpoint",
    ),
    _row(
        _INVALID,
        r"Target configuration failed: model disabled and no hardware IPU found",
        MissingError,
        "no IPU is visible to this process",
        _DOCTOR,
    ),
    _row(
        _FAILED,
        r"Unsupported number of IPUs requested - could not find an IPU device with (?P<ipus>\d+) IPUs",
        MissingError,
        "there is no device of {ipus} IPUs here",
        "use fewer replicas (evaluate: --validation-num-replicas) or stages, or a larger partition; "
        + _DOCTOR,
    ),
    _remote_memory(
        "optimizer_state_offloading",
        r"does not support remote memory and therefore weight update only variables",
    ),
    _remote_memory(
        "offload_activations", r"Activations? offloading has been enabled, however the current configuration"
    ),
    _remote_memory(
        "offload_gradient_accumulation_buffers",
        r"Gradient accumulation buffer offloading has been enabled, however",
    ),
    Case(_INTERNAL, r"\[Poplar\]\[Load engine\]", _not_loaded),
    _row(
        ("InternalError",),
        r"Could not find an available device for TensorFlow virtual device",
        MissingError,
        "no free device{size}: others use them",
        "gc-monitor shows who does; wait, or use --on-demand, which waits for them",
    ),
    _row(
        ("InternalError",),
        r"Timed out trying to find an available device",
        MissingError,
        "no IPUs became free in the time that --on-demand waits",
        "gc-monitor shows who uses them; TF_POPLAR_FLAGS=--on_demand_device_timeout=MILLISECONDS waits longer",
    ),
    _row(
        _INVALID,
        r"No device matches the requested configuration",
        MissingError,
        "no device{size} matches what was asked for",
        _DOCTOR,
    ),
    _row(
        ("InternalError",),
        r"Unable to open Poplar device",
        MissingError,
        "the IPU driver cannot be opened",
        f"is its service running? {_DOCTOR}",
    ),
    _row(
        _FAILED,
        r"'executable_cache_path' in 'TF_POPLAR_FLAGS' has not been set",
        ConfigurationError,
        "compiling without IPUs needs a folder for what is compiled",
        "export TF_POPLAR_FLAGS=--executable_cache_path=FOLDER",
    ),
    Case(
        _FAILED,
        r"The number of iterations of the pipeline must be (?P<kind>a multiple of|at least) (?P<base>\d+)"
        r"(, but it is (?P<given>\d+))?",
        _depth,
    ),
    _row(
        ("InternalError",),
        r"Trying to compile a graph for an IPU device with (?P<ipus>\d+) IPUs and (?P<shards>\d+) shards",
        ConfigurationError,
        "a device of {ipus} IPUs cannot be divided into replicas of {shards}",
        "use a number of IPUs that is a multiple of {shards}: --num-replicas",
    ),
    _row(
        ("InternalError",),
        r"must be divisible by distributed_batch_norm_replica_group_size",
        ConfigurationError,
        "--dbn-replica-group-size does not divide the number of replicas",
        "use a divisor of --num-replicas, or 1",
    ),
    _row(
        _FAILED,
        r"Unsupported datatype (?P<dtype>\w+) on index (?P<index>\d+) of feed operation",
        DataError,
        "IPUs take no {dtype} data (component {index} of the data set)",
        "the types they take are int32, float32, float16, bool, int8 and uint8",
    ),
    _row(
        _FAILED,
        r"Detected a NaN constant instruction",
        ConfigurationError,
        "the network has a constant that is not a number",
        "look for it in the weights or the data that it starts from; TF_POPLAR_FLAGS=--allow_nans lets it pass",
    ),
    # XLA's text (tf2xla/xla_compiler.cc); the CPU's differs in the device's name.
    Case(
        ("InvalidArgumentError", "UnimplementedError"),
        r"[Dd]etected unsupported operations when trying to compile graph .* on XLA_IPU",
        _unsupported,
    ),
    _enable_row(
        _IMPORT, r"(?P<what>lib(?:pop|gcl|gcipuinfo|pva|pvti)[\w.+-]*): cannot open shared object file"
    ),
    _enable_row(("ImportError",), r"No module named '(?P<what>popdist|libpvti|popef|popart|poplar)\b"),
    _row(
        ("ImportError",),
        r"(?:No module named '|cannot import name ')"
        r"(?P<what>tensorflow\.python\.ipu|tensorflow\.compiler\.plugin\.poplar|keras\.ipu|ipu_tensorflow_addons|ipu\b)",
        MissingError,
        "this is not the Poplar SDK's TensorFlow and Keras: {what} is missing",
        "install the SDK's tensorflow, keras and ipu_tensorflow_addons wheels (docs/ipu.md)",
    ),
    _row(
        ("ImportError", "RuntimeError", "ValueError", "AttributeError"),
        r"module compiled against (?:API|ABI) version 0x\w+ but this version of numpy is"
        r"|numpy\.\w+ size changed, may indicate binary incompatibility"
        r"|numpy\.core\.\w+ failed to import"
        r"|module 'numpy' has no attribute '(?:bool|int|float|object|str|typeDict|complex)'",
        MissingError,
        "this NumPy is not the one that the Poplar SDK's TensorFlow was built with",
        "python -m pip install 'numpy==1.19.5'",
    ),
    _row(
        _IMPORT,
        r"Python version mismatch: module was compiled for Python 3\.8, but the interpreter version is"
        r"|undefined symbol: _?Py\w+",
        MissingError,
        "the Poplar SDK's TensorFlow is built for Python 3.8, and this is another Python",
        "make the environment with it: python3.8 -m venv ENV (docs/ipu.md)",
    ),
    # The following errors end the process with SIGABRT and a line on stderr.
    _row(
        (),
        r"An infeed dataset iterator has failed with status|Infeed dataset iterator out of range",
        DataError,
        "the data set failed or ended while the IPUs were running, which ends the process",
        "`ipucnn train --device cpu` shows the error itself",
    ),
)


def _translated(text: str, classes: Set[str], context: ErrorContext) -> Optional[UserError]:
    """Returns the error of the first case that fits; without classes (text on stderr), any case may."""
    for case in CASES:
        match = re.search(case.pattern, text) if not classes or classes & set(case.classes) else None
        if match is not None:
            return case.answer(match, context)
    return None


def translate(exception: BaseException, context: ErrorContext = ErrorContext()) -> Optional[UserError]:
    """Returns the error for the user, or None if the exception is unknown (a bug, or an error of other code).

    Args:
        exception: the exception from the SDK's TensorFlow; AutoGraph's "in user code:" around the text does not matter.
        context: the facts for better hints.
    """
    if isinstance(exception, UserError):
        return None
    return _translated(str(exception), {kind.__name__ for kind in type(exception).__mro__}, context)


def translate_output(stderr: str) -> Optional[UserError]:
    """Returns the error for the user from the stderr of a process that aborted, or None."""
    return _translated(stderr, set(), ErrorContext())


@contextlib.contextmanager
def poplar_errors(context: ErrorContext = ErrorContext()) -> Iterator[None]:
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
