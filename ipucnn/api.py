"""The Python API: the functions of ``import ipucnn``.  TensorFlow is imported only when a function needs it.

The API mirrors the commands: it has the same options with ``_`` in place of ``-``, the same errors
(``ipucnn.errors.UserError``, with ``message`` and ``hint``), and the same results.
"""

import contextlib
import functools
import inspect
import re
import shlex
import warnings
from dataclasses import replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
    Union,
    cast,
)

import numpy as np

from ipucnn.aliases import KerasModel, PillowImage, PlainValue
from ipucnn.commands.export import Export
from ipucnn.commands.plan_splits import PlanSplits
from ipucnn.config.command import own_options
from ipucnn.config.options import RunConfig, find_spec, specs_for
from ipucnn.config.request import RunRequest
from ipucnn.config.spec import convert_value
from ipucnn.errors import ConfigurationError, DataError, UserError, did_you_mean
from ipucnn.events import Event, show
from ipucnn.filesystem import expand, user_error_of
from ipucnn.runs.compare import read_run
from ipucnn.sessions.host.environment import set_needed, settings_of_program_kept
from ipucnn.text import quoted, shown_value

if TYPE_CHECKING:
    from ipucnn.planning.pipeline_plan import PipelinePlan
    from ipucnn.runs.sources import WeightsArgument
    from ipucnn.runs.train import TrainingRun
    from ipucnn.runs.trained import TrainedSetup
    from ipucnn.sessions.session import Predictor

Image = Union[str, Path, np.ndarray, PillowImage]
"""A file, a Pillow image, or uint8 pixels [height, width] or [height, width, 1, 3 or 4], in the order RGB or RGBA."""


@contextlib.contextmanager
def _as_the_command_line() -> Iterator[None]:
    """Runs a block as a command runs it, and leaves the program's settings of Keras and TensorFlow as they were.

    It raises the errors that the command line prints, also for those of the system; hints are in words of the API.
    """
    try:
        with settings_of_program_kept():
            yield
    except UserError as error:
        error.hint = error.hint and _WORDS.sub(_in_python, error.hint)
        raise
    except Exception as error:
        user_error = user_error_of(error)
        if user_error is None:
            raise
        raise user_error from error


_OWN = {spec.name: spec for of in (Export, PlanSplits) for spec in own_options(of)}
_NUMBERS = {name: _OWN[name] for name in ("stages", "batch", "opset")}
# A command line of a hint, or an option with the word behind it.
_WORDS = re.compile(
    r"`ipucnn ([^`]+)`|ipucnn ([^`,;()]+)|--([a-z][a-z0-9-]*)(?: (?!--)((?:'[^']*'|[^\s,;()'`])+(?<!:)))?"
)
_FUNCTIONS = {"train": "train", "evaluate": "evaluate", "plan-splits": "plan"}


def _in_python(match: "re.Match[str]") -> str:
    """Returns a command line of a hint as a call, or unchanged if it has none; or an option as a keyword."""
    line, flag, value = match[1] or match[2], match[3], match[4]
    if line is not None:
        command, _, words = line.partition(" ")
        target, _, options = words.partition(" ")
        if command not in _FUNCTIONS or target[:1] in ("", "-") or _WORDS.sub("", options).strip():
            return match[0]
        keywords = (_in_python(option) for option in _WORDS.finditer(options))
        return f"ipucnn.{_FUNCTIONS[command]}({', '.join([repr(target), *keywords])})"
    is_off = find_spec(flag) is None and flag.startswith("no-")
    spec = find_spec(flag[3:] if is_off else flag) or _OWN.get(flag.replace("-", "_"))
    name = flag.replace("-", "_") if spec is None else "model" if spec.name == "model_name" else spec.name
    if spec is not None and spec.is_bool:
        return f"{name}={not is_off}" + (f" {value}" if value else "")
    if value is None:
        return name
    # A word of the sentence is no value: "--run-dir with", but "--dataset mnist, ".
    if value in ("and", "or") or (
        value.isalpha() and not re.match(r"$|[,;)]| --", match.string[match.end() :])
    ):
        return f"{name} {value}"
    value = shlex.split(value)[0]
    is_number = spec is not None and spec.kind.is_number and re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", value)
    return f"{name}={value if is_number else repr(value)}"


_TEXTS = {
    "run": 'run="runs/mine"',
    "model": 'model="lenet"',
    "checkpoint": 'checkpoint="best"',
    "system": 'system="pod16"',
    "format": 'format="onnx"',
    "output": 'output="exports/mine"',
}
_Function = TypeVar("_Function", bound=Callable[..., object])


def _guarded(function: _Function) -> _Function:
    """Wraps an API function so that it refuses the arguments that the command line refuses, with the same errors.

    Texts and numbers are checked here; ``**options`` are checked together with the options of the command line.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    @_as_the_command_line()
    def checked(*args: object, **kwargs: object) -> object:
        arguments = signature.bind(*args, **kwargs).arguments
        for name, value in arguments.items():
            if value is None and signature.parameters[name].default is None:
                continue
            if name in _NUMBERS:
                arguments[name] = convert_value(_NUMBERS[name], _plain(value), _NUMBERS[name].flag)
            elif name in _TEXTS and not isinstance(value, (str, Path)):
                kind = shown_value(type(value).__name__)
                raise ConfigurationError(
                    f"{name} is of type {kind}: must be text or a path", f"for example {_TEXTS[name]}"
                )
        options = arguments.pop("options", {})
        return function(**arguments, **cast(Dict[str, object], options))

    return cast(_Function, checked)


class Run:
    """A trained network, ready to predict; see :func:`load`.

    Attributes:
        config: the run's configuration, every option by its name.
        labels: names of the classes, in the order of the outputs.
    """

    def __init__(self, trained: "TrainedSetup", path: str) -> None:
        self._trained, self._path = trained, path
        self._predictor: Optional[Predictor] = None
        self._finish: Optional[Callable[[np.ndarray], Any]] = None
        self._model: KerasModel = None
        self.config: RunConfig = trained.config

    @property
    def labels(self) -> Tuple[str, ...]:
        """The names of the classes, in the order of the outputs."""
        return self._trained.labels

    @property
    @_as_the_command_line()
    def history(self) -> List[Dict[str, Any]]:
        """The rows of ``metrics.jsonl`` of the run, or of the checkpoint's run; see :func:`read_history`.

        Raises:
            ConfigurationError: this is an exported file, which has no history.
            DataError: the weights lie in no run folder.
        """
        self._refuse_exported("history")
        folder = self._trained.weights.folder
        if folder is None:
            raise DataError(
                f"{self._path} lies in no run folder, which has the history",
                "give the folder of its run to ipucnn.read_history",
            )
        return read_run(folder.path).history

    @property
    @_as_the_command_line()
    def keras_model(self) -> KerasModel:
        """The network as a Keras model with its weights; its inputs are images that the input pipeline prepared.

        Raises:
            ConfigurationError: this is an exported file, which has no Keras model.
        """
        self._refuse_exported("Keras model")
        if self._model is None:
            self._ready()
        return self._model

    @_as_the_command_line()
    def predict(self, images: Union[Image, Sequence[Image]]) -> np.ndarray:
        """Predicts the class probabilities of images, prepared as ``ipucnn infer`` prepares them.

        Args:
            images: an image, a list of images, or images of one size in an array [images, height, width, channels];
                for a grey data set also [images, height, width].  An image is a path, an image of Pillow, or an array
                of 1, 3 or, with transparency, 4 channels.  An orientation tag is applied to files and to images of
                Pillow that are still a file's, not to those made from them, such as turned ones.

        Returns:
            float32 [n, classes].

        Warns:
            UserWarning: files have several pages or transparent parts; their number.

        Raises:
            DataError: an image cannot be read, or an array does not hold 8-bit pixels.
            ConfigurationError: the network segments images; use ``ipucnn infer``.
        """
        from ipucnn.datasets.problems import remark_lines
        from ipucnn.runs.infer import largest_batch
        from ipucnn.training.evaluation import log_softmax

        if self._trained.record.task != "classification":
            raise ConfigurationError(
                f"{self._trained.record.name} segments images, and predict() gives one answer for each",
                "write masks with: ipucnn infer RUN IMAGE --output masks",
            )
        if isinstance(images, np.ma.MaskedArray):
            raise DataError(
                "the images are a masked array, and networks see all pixels", "fill it: images.filled(0)"
            )
        if hasattr(images, "__array__") and not hasattr(images, "convert"):
            images = np.asarray(images)  # a tensor; images of Pillow are converted by their mode
        if isinstance(images, np.ndarray):
            is_one = not self._is_batch(images)
        else:
            is_one = isinstance(images, (str, Path)) or not hasattr(images, "__iter__")
        images = [images] if is_one else images
        remarks: List[str] = []
        pixels = [self._pixels(image, remarks) for image in cast(Sequence[Image], images)]
        for line in remark_lines(remarks):
            warnings.warn(line, stacklevel=3)
        self._ready()
        assert self._predictor is not None and self._finish is not None
        probabilities = [np.zeros((0, self._trained.source.info.num_classes))]
        step = largest_batch(self._trained)
        for first in range(0, len(pixels), step):
            batch = self._finish(np.stack(pixels[first : first + step]))
            probabilities.append(np.exp(log_softmax(np.asarray(self._predictor.predict([batch])[0]))))
        return np.concatenate(probabilities).astype(np.float32)

    def _refuse_exported(self, what: str) -> None:
        if self._trained.weights.is_exported:
            raise ConfigurationError(
                f"{self._path} is an exported file, which has no {what}",
                "load the run that it was exported from",
            )

    def _is_batch(self, images: np.ndarray) -> bool:
        """Whether an array holds several images; arrays of grey images need no channel axis."""
        if images.ndim != 3:
            return images.ndim > 3
        # For a network of colour images the array may be one image with its channels first, so nothing is guessed.
        # A last axis of four is one image with transparency, rather than images four pixels wide.
        is_grey = 1 in (self._trained.input_shape[2], self._trained.source.info.image_shape[2])
        return is_grey and images.shape[2] > 4

    def _pixels(self, image: Image, remarks: List[str]) -> np.ndarray:
        from ipucnn.datasets.images import pixels_for_evaluation
        from ipucnn.runs.images.inputs import images_of_files

        info, input_shape = self._trained.source.info, self._trained.input_shape
        if isinstance(image, (str, Path)):
            (file,) = images_of_files([str(image)], info, input_shape, remarks)
            return file.read()
        # The check does not import Pillow.  Pillow's plugins derive classes of their own.
        if any(kind.__module__ == "PIL.Image" for kind in type(image).__mro__):
            try:
                return pixels_for_evaluation(image, "image", info, input_shape)
            except (OSError, ValueError) as error:  # a closed or damaged file behind it
                raise DataError(f"an image of Pillow cannot be read: {error}", "open it again") from error
        try:
            pixels = np.asarray(image)
        except ValueError:  # a pair of an image and a label
            pixels = np.empty(0, object)
        pixels = pixels[..., np.newaxis] if pixels.ndim == 2 else pixels
        if (
            pixels.dtype != np.uint8
            or pixels.ndim != 3
            or pixels.shape[2] not in (1, 3, 4)
            or not pixels.size
        ):
            raise DataError(
                f"an array of type {pixels.dtype} and shape {list(np.shape(image))} is no image",
                "give uint8 pixels of 0..255: [height, width], [height, width, 1, 3 or 4], or of several images "
                "[images, height, width, 1, 3 or 4], where images[..., np.newaxis] adds the last axis to grey ones",
            )
        if pixels.shape[2] == 4:  # with transparency, as such files have it: white is laid under it
            from PIL import Image as pillow

            return self._pixels(pillow.fromarray(pixels), remarks)
        return pixels_for_evaluation(pixels, f"array of shape {list(pixels.shape)}", info, input_shape)

    def _ready(self) -> None:
        """Builds the network and its predictor on the first call."""
        if self._predictor is not None:
            set_needed(self.config.deterministic_operations)
            return
        from ipucnn.runs.infer import finisher
        from ipucnn.runs.setup import move_preprocessing

        moved, session = move_preprocessing(self._trained, self._trained.session(verbose=False))
        self._finish = finisher(moved)
        self._model, notes = self._trained.build()
        for note in notes:
            warnings.warn(note, stacklevel=4)
        self._predictor = session.predictor(self._model)


@_guarded
def load(
    run: Union[str, Path],
    checkpoint: Optional[str] = None,
    model: Optional[str] = None,
    **options: PlainValue,
) -> Run:
    """Opens a run folder, a checkpoint, an exported ONNX or TFLite file, or a file of Keras.

    >>> import ipucnn
    >>> run = ipucnn.load("runs/mine")
    >>> run.labels
    ('0', '1', '2', '3', '4', '5', '6', '7', '8', '9')
    >>> import numpy as np
    >>> run.predict(np.zeros((2, 8, 8, 1), np.uint8)).shape
    (2, 10)

    Args:
        run: path of the run folder, checkpoint or file.
        checkpoint: the run's checkpoint: "best", "last", or a file name; None for the last one, if any.
        model: the function that makes the network, "my_net.py:build", whose file is run; needed if the network has
            layers of your own.  For a file of Keras, the file again if it holds a network, or a network's name.
        options: options of ``ipucnn infer`` that all commands share, by name, and ``weights``.  A file of Keras needs
            ``dataset``, the set it was trained on, which also takes arrays.

    Raises:
        UserError: as for ``ipucnn infer``.
    """
    from ipucnn.runs.trained import open_trained

    return Run(open_trained(_named("infer", run, checkpoint, model, options), reads_data=False), str(run))


def _named(
    command: str,
    run: Union[str, Path],
    checkpoint: Optional[str],
    model: Optional[str],
    options: Mapping[str, PlainValue],
) -> "WeightsArgument":
    from ipucnn.runs.sources import WeightsArgument

    flags = _flags(command, {name: value for name, value in options.items() if name != "weights"})
    if model is not None:
        flags["model_name"] = model
    weights = options.get("weights")
    return WeightsArgument(command, str(run), flags, checkpoint, None if weights is None else str(weights))


@_guarded
def evaluate(
    run: Union[str, Path],
    checkpoint: Optional[str] = None,
    model: Optional[str] = None,
    **options: PlainValue,
) -> Dict[str, Any]:
    """Evaluates a run on held-out data, as ``ipucnn evaluate`` does.

    >>> import ipucnn
    >>> result = ipucnn.evaluate("runs/mine")
    >>> result["measured"]["samples"]
    40

    Args:
        run, checkpoint, model: as :func:`load` takes them.
        options: options of ``ipucnn evaluate`` that all commands share, by name, such as ``dataset_path``, and
            ``weights``; ``dataset`` also takes arrays, as in :func:`train`; a single pair of arrays is evaluated as a
            whole.

    Returns:
        The result that ``ipucnn evaluate --json`` prints: ``measured``, ``classes``, ``confusion_matrix`` and others.

    Raises:
        UserError: as for the command.
    """
    from ipucnn.runs.evaluate import evaluate_run
    from ipucnn.runs.records import plain
    from ipucnn.runs.requests import EvaluateRequest

    return plain(show(evaluate_run(EvaluateRequest(_named("evaluate", run, checkpoint, model, options)))))


@_guarded
def export(
    run: Union[str, Path],
    format: str,
    output: Union[str, Path, None] = None,
    checkpoint: Optional[str] = None,
    model: Optional[str] = None,
    *,
    batch: Optional[int] = None,
    opset: Optional[int] = None,
    half: bool = False,
    int8: bool = False,
    raw_uint8: bool = False,
    probabilities: bool = False,
    overwrite: bool = False,
    **options: PlainValue,
) -> Dict[str, Any]:
    """Writes a run's network in another format and verifies it, as ``ipucnn export`` does.

    Args:
        run, checkpoint, model: as :func:`load` takes them.
        format: "onnx", "tflite", "saved-model", "keras" or "ipu".
        output: folder to write; None for ``exports/NAME-FORMAT``.
        batch, opset, half, int8, raw_uint8, probabilities, overwrite: as the command's options.
        options: options of ``ipucnn export`` that all commands share, by name, and ``weights``.

    Returns:
        The content of ``export.json``, and ``folder``.

    Raises:
        UserError: as for the command; ``ThresholdError`` if the results of the file differ from those of the run.
    """
    from ipucnn.runs.export import export_run
    from ipucnn.runs.requests import ExportRequest

    request = ExportRequest(
        _named("export", run, checkpoint, model, options),
        str(format),
        batch=batch,
        opset=opset,
        half=half,
        int8=int8,
        raw_uint8=raw_uint8,
        probabilities=probabilities,
        output=None if output is None else expand(str(output)),
        overwrite=overwrite,
    )
    return show(export_run(request))


@_guarded
def read_history(run: Union[str, Path]) -> List[Dict[str, Any]]:
    """Reads a run's ``metrics.jsonl``: a row for each execution and validation, with ``event`` and ``weight_updates``.

    >>> import ipucnn
    >>> [row["weight_updates"] for row in ipucnn.read_history("runs/mine") if row["event"] == "validation"]
    [2, 4]

    Raises:
        DataError: the folder is not a run.
    """
    return read_run(expand(str(run))).history


@_guarded
def plan(
    model: str, *, stages: Optional[int] = None, system: Optional[str] = None, **options: PlainValue
) -> "PipelinePlan":
    """Plans how to split a network over IPUs, as ``ipucnn plan-splits`` does.

    >>> import ipucnn
    >>> plan = ipucnn.plan("resnet18", stages=2, dataset="cifar10", micro_batch_size=4)
    >>> len(plan.splits), plan.verdict, plan.optimal
    (1, 'fits', True)

    Args:
        model: a network of ``ipucnn models``, or a file that holds one.
        stages: number of pipeline stages; None searches for the best use of the IPUs.
        system: the system to plan for; None for the smallest POD.
        options: options of ``ipucnn plan-splits``, by name, but for those of files and for ``optimisations``.

    Raises:
        UserError: as for the command; ``InfeasibleError`` if no plan fits.
    """
    from ipucnn.commands.plan_splits import PlanSplits
    from ipucnn.commands.rules import PLAN_SPLITS_RULES
    from ipucnn.config.command import read_options
    from ipucnn.config.rules import check_rules
    from ipucnn.planning.plan import check_not_fitting, make_plan
    from ipucnn.planning.question import make_question
    from ipucnn.sessions.host.environment import import_tensorflow

    of_plans = {name: _plain(options.pop(name)) for name in _OF_PLANS if name in options}
    typed = read_options(PlanSplits, "plan-splits", {n: v for n, v in of_plans.items() if v is not None})
    resolved = _request("plan-splits", model, options).resolve()
    check_rules(PLAN_SPLITS_RULES, replace(typed, stages=stages), resolved.origins)
    given = {name: getattr(typed, name) for name in _OF_PLANS if name != "compare"}
    question = make_question(resolved, stages=stages, system=system, **given)
    best_plan = show(make_plan(question, list(typed.compare), import_tensorflow))
    check_not_fitting(best_plan, question)
    return best_plan


_OF_PLANS = ("row", "classes", "recomputation", "inference", "compare", "stage_proportions")
"""Options of ``plan-splits`` itself besides the parameters of :func:`plan`."""


class Training:
    """A training run that starts when it is iterated over; it can be iterated over only once.  See :func:`train`.

    Attributes:
        folder: the run folder.
        report: the content of ``report.json`` after the run.
    """

    def __init__(self, run: "TrainingRun") -> None:
        self._run = run
        self.folder: Path = run.context.folder.path
        self._has_begun = False

    def __del__(self) -> None:
        if not getattr(self, "_has_begun", True):
            warnings.warn(
                f"this training was never iterated over, so nothing was trained (run {self.folder}): "
                "for event in ipucnn.train(...): ...",
                stacklevel=2,
            )

    @property
    def report(self) -> Mapping[str, Any]:
        """The content of ``report.json`` after the run; empty before that."""
        from ipucnn.runs.records import plain

        return {} if self._run.final_report is None else plain(self._run.final_report)

    def __iter__(self) -> Iterator[Event]:
        """Trains, and yields each event as it happens.

        Raises:
            ConfigurationError: it was iterated over before.
        """
        # Checked outside of the generator, whose first line runs only when the first event is requested.
        if self._has_begun:
            raise ConfigurationError(
                f"this training has been iterated over before, and it trains only once; its run is {self.folder}",
                "call ipucnn.train() again for a new run; to read the events twice, keep them: "
                "events = list(ipucnn.train(...))",
            )
        self._has_begun = True
        return self._events()

    def _events(self) -> Iterator[Event]:
        from ipucnn.reports.runs import write_page_of
        from ipucnn.reports.train import draw_predictions
        from ipucnn.runs.recorder import Predicted

        with contextlib.closing(self._run.events()) as events:
            while True:
                # Between two events the program works with its own settings.
                with _as_the_command_line():
                    set_needed(self._run.context.config.deterministic_operations)
                    event = next(events, None)
                    if isinstance(event, Predicted):
                        draw_predictions(self._run, event.images)
                    if event is None:
                        write_page_of(self._run)
                        return
                yield event


@_guarded
def train(model: str, **options: PlainValue) -> Training:
    """Checks a training run as ``ipucnn train`` does, and returns an object that trains when it is iterated over.

    >>> import ipucnn
    >>> training = ipucnn.train("toy_model", dataset="digits", limit_train=64, num_epochs=1, seed=1, run_dir="runs/new")
    >>> names = [type(event).__name__ for event in training]
    >>> names[0], "ExecutionFinished" in names, "Validated" in names
    ('Started', True, True)
    >>> str(training.folder), training.report["trained_samples"]
    ('runs/new', 64)

    Args:
        model: a network of ``ipucnn models``.
        options: options of ``ipucnn train``, by name.  ``dataset`` also takes arrays: one pair (images, labels), of
            which a fifth of each class is held out, or two pairs, for training and for evaluation; either may be
            followed by the names of the classes.  Images are uint8 [n, height, width] or [n, height, width, 1 or 3].

    Raises:
        UserError: as for the command, in this call or during training.
    """
    from ipucnn.runs.resume import is_cross_validation
    from ipucnn.runs.train import TrainingRun

    resolved = _request("train", model, options).resolve()
    if is_cross_validation(resolved):
        raise ConfigurationError(
            "kfold: ipucnn.train() trains one run, and a cross-validation is several",
            f"ipucnn train {quoted(model)} --kfold N in a terminal",
        )
    if resolved.config.dry_run:
        raise ConfigurationError(
            "dry_run: ipucnn.train() checks a run when it is called, and trains when it is iterated over",
            "leave it out, and do not iterate over what is returned",
        )
    return Training(TrainingRun(resolved))


def _request(command: str, model: str, options: Mapping[str, PlainValue]) -> RunRequest:
    """Makes the request of a command from options as keywords.

    Raises:
        ConfigurationError: the command has no such option.
    """
    from ipucnn.planning.pipeline_plan import read_plan

    recipe, file = options.get("config"), options.get("config_path")
    of_command = ("stages", "system", *_OF_PLANS) if command == "plan-splits" else ()
    return RunRequest(
        command,
        _flags(
            command,
            {key: value for key, value in options.items() if key not in ("config", "config_path")},
            of_command,
        ),
        model,
        config_name=None if recipe is None else str(recipe),
        config_path=None if file is None else expand(str(file)),
        read_plan=read_plan,
    )


def _flags(command: str, options: Mapping[str, PlainValue], others: Sequence[str] = ()) -> Dict[str, Any]:
    """Converts options as keywords into the options of the command line.

    Args:
        others: further valid keywords, which the hint of an error can suggest.

    Raises:
        ConfigurationError: the command has no such option.
    """
    known = [spec.name for spec in specs_for(command) if spec.name != "model_name"]
    flags: Dict[str, Any] = {}
    names: Dict[str, str] = {}
    for name, value in options.items():
        spec = find_spec(name)  # in any spelling that the command line takes
        if spec is None or spec.name not in known:
            raise ConfigurationError(
                f"`ipucnn {command}` has no option {name}",
                did_you_mean(name, [*known, *others]) or f"`ipucnn {command} --help` lists them",
            )
        if names.setdefault(spec.name, name) != name:
            raise ConfigurationError(
                f"{names[spec.name]} and {name} are two names of one option", f"give {spec.name} alone"
            )
        if spec.name == "dataset" and value is not None and not isinstance(value, (str, Path)):
            from ipucnn.datasets.limits import HELD_OUT_SHARE
            from ipucnn.datasets.sources.in_memory import keep

            share = options.get("validation_fraction")
            # A value that is no share is refused later.
            held_out = share if isinstance(share, float) and 0 < share < 1 else HELD_OUT_SHARE
            value = keep(value, command != "train", held_out)
        if value is not None:
            flags[spec.name] = _plain(value)
    return flags


def _plain(value: object) -> object:
    """Converts NumPy numbers, which loops over arrays give, to Python numbers, and paths to text."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
