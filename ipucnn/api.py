"""The Python API: what ``import ipucnn`` gives.  Nothing heavy is imported until a function needs it.

It says what the commands say: the same options under the same names, with ``_`` in place of ``-``, the same errors
(``ipucnn.errors.UserError``, with ``message`` and ``hint``), and the same results.
"""

import contextlib
import functools
import inspect
import warnings
from pathlib import Path
from types import MappingProxyType
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
from ipucnn.config import spec as numbers
from ipucnn.config.options import RunConfig, find_spec, specs_for
from ipucnn.config.request import RunRequest
from ipucnn.errors import ConfigurationError, DataError, did_you_mean
from ipucnn.filesystem import absolute, expand, is_folder, user_error_of
from ipucnn.runs.compare import read_run
from ipucnn.text import shown_value

if TYPE_CHECKING:
    from ipucnn.planning.pipeline_plan import PipelinePlan
    from ipucnn.runs.recorder import RunEvent
    from ipucnn.runs.train import TrainingRun
    from ipucnn.runs.trained import Named, TrainedSetup
    from ipucnn.sessions.session import Session

Image = Union[str, Path, np.ndarray, PillowImage]
"""A file, an image of Pillow, or uint8 pixels [height, width] or [height, width, 1 or 3], red, green, blue."""


_ALSO_CALLED = {"batch_size": ("micro_batch_size", "global_batch_size")}
"""What Keras calls an option whose name here says more."""


@contextlib.contextmanager
def _as_the_command_line() -> Iterator[None]:
    """What the command line says of the system's errors and of memory that ran out is a ``UserError`` here."""
    try:
        yield
    except Exception as error:
        told = user_error_of(error)
        if told is None:
            raise
        raise told from error


_TEXTS = {
    "run": 'run="runs/mine"',
    "model": 'model="lenet"',
    "checkpoint": 'checkpoint="best"',
    "system": 'system="pod16"',
    "format": 'format="onnx"',
    "output": 'output="exports/mine"',
}
_NUMBERS = {"stages": numbers.STAGES, "batch": numbers.EXPORT_BATCH, "opset": numbers.OPSET}
_Function = TypeVar("_Function", bound=Callable[..., object])


def _guarded(function: _Function) -> _Function:
    """The guard at the edge of the interface: what no command line could hold is refused as a command refuses it.

    Texts and numbers are checked here; options (``**options``) where the command line's are.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        given = signature.bind(*args, **kwargs).arguments
        for name, value in given.items():
            if value is None and signature.parameters[name].default is None:
                continue
            if name in _NUMBERS:
                given[name] = _NUMBERS[name].flag(name)(str(value))
            elif name in _TEXTS and not isinstance(value, (str, Path)):
                kind = shown_value(type(value).__name__)
                raise ConfigurationError(
                    f"{name} is of type {kind}: must be text or a path", f"for example {_TEXTS[name]}"
                )
        options = given.pop("options", {})
        with _as_the_command_line():
            return function(**given, **cast(Dict[str, object], options))

    return cast(_Function, checked)


class Run:
    """A trained network, ready to predict; see :func:`load`.

    Attributes:
        config: the run's configuration, every option by its name.
        labels: the names of the classes, in the order of the outputs.
    """

    def __init__(self, trained: "TrainedSetup", path: str) -> None:
        self._trained, self._path = trained, path
        self._session: Optional[Session] = None
        self._model: KerasModel = None
        self.config: RunConfig = trained.config

    @property
    def labels(self) -> Tuple[str, ...]:
        """The names of the classes, in the order of the outputs."""
        return self._trained.names()

    @property
    @_as_the_command_line()
    def history(self) -> List[Dict[str, Any]]:
        """The rows of the run's ``metrics.jsonl``, of a checkpoint those of its run; see :func:`read_history`.

        Raises:
            ConfigurationError: an exported file has none.
        """
        self._refuse_exported("history")
        path = expand(self._path)
        return read_run(path if is_folder(path) else absolute(path).parent.parent).history

    @property
    @_as_the_command_line()
    def keras_model(self) -> KerasModel:
        """The network as a Keras model with its weights; it takes images as the input pipeline gives them.

        Raises:
            ConfigurationError: an exported file is none.
        """
        self._refuse_exported("Keras model")
        if self._model is None:
            self._ready()
        return self._model

    @_as_the_command_line()
    def predict(self, images: Union[Image, Sequence[Image]]) -> np.ndarray:
        """The probabilities of the classes of images, which are brought to the network as ``ipucnn infer`` does it.

        Args:
            images: one, several in a list, or several of one size in an array [images, height, width, channels];
                where the data set is grey, [images, height, width] will do.

        Returns:
            float32 [n, classes].

        Raises:
            DataError: an image cannot be read, or an array is none of 8-bit pixels.
            ConfigurationError: the network segments images, which ``ipucnn infer`` does.
        """
        from ipucnn.runs.infer import LARGEST_BATCH, finisher
        from ipucnn.training.evaluation import log_softmax

        if self._trained.record.task != "classification":
            raise ConfigurationError(
                f"{self._trained.record.name} segments images, and predict() gives one answer for each",
                "write masks with: ipucnn infer RUN IMAGE --output masks",
            )
        if isinstance(images, np.ndarray):
            is_one = not self._is_batch(images)
        else:
            is_one = isinstance(images, (str, Path)) or not hasattr(images, "__iter__")
        images = [images] if is_one else images
        pixels = [self._pixels(image) for image in cast(Sequence[Image], images)]
        self._ready()
        assert self._session is not None
        finish = finisher(self._trained)
        probabilities = [np.zeros((0, self._trained.source.info.num_classes))]
        for first in range(0, len(pixels), LARGEST_BATCH):
            batch = finish(np.stack(pixels[first : first + LARGEST_BATCH]))
            probabilities.append(np.exp(log_softmax(np.asarray(self._session.predict([batch])[0]))))
        return np.concatenate(probabilities).astype(np.float32)

    def _refuse_exported(self, what: str) -> None:
        if self._trained.runtime is not None:
            raise ConfigurationError(
                f"{self._path} is an exported file, which has no {what}",
                "load the run that it was exported from",
            )

    def _is_batch(self, images: np.ndarray) -> bool:
        """Whether an array holds several images, of grey ones also without an axis of channels."""
        if images.ndim != 3:
            return images.ndim > 3
        # Of a network of colour images it may be one image with the channels first, which is not to be guessed.  Four
        # channels are an image with transparency, which is refused, rather than images four pixels wide.
        is_grey = 1 in (self._trained.input_shape[2], self._trained.source.info.image_shape[2])
        return is_grey and images.shape[2] > 4

    def _pixels(self, image: Image) -> np.ndarray:
        from ipucnn.datasets.images import pixels_for_evaluation
        from ipucnn.runs.images.inputs import images_of_files

        info, input_shape = self._trained.source.info, self._trained.input_shape
        if isinstance(image, (str, Path)):
            (file,) = images_of_files([str(image)], info, input_shape)
            return file.read()
        # Pillow need not be imported to know; plugins have classes of their own.
        if any(kind.__module__ == "PIL.Image" for kind in type(image).__mro__):
            try:
                return pixels_for_evaluation(image, "image", info, input_shape)
            except (OSError, ValueError) as error:  # a closed or damaged file behind it
                raise DataError(f"an image of Pillow cannot be read: {error}", "open it again") from error
        pixels = np.asarray(image)
        pixels = pixels[..., np.newaxis] if pixels.ndim == 2 else pixels
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or not pixels.size:
            raise DataError(
                f"an array of type {pixels.dtype} and shape {list(np.shape(image))} is no image",
                "give uint8 pixels of 0..255: [height, width], [height, width, 1 or 3], or of several images "
                "[images, height, width, 1 or 3], where images[..., np.newaxis] adds the last axis to grey ones",
            )
        return pixels_for_evaluation(pixels, f"array of shape {list(pixels.shape)}", info, input_shape)

    def _ready(self) -> None:
        """Builds the network and its session, once."""
        if self._session is not None:
            return
        session = self._trained.session(verbose=False)
        self._model = self._trained.build()
        session.prepare_evaluation(self._model, None)
        self._session = session


@_guarded
def load(run: Union[str, Path], checkpoint: Optional[str] = None, model: Optional[str] = None) -> Run:
    """Opens a run folder, a checkpoint, or an exported ONNX or TFLite file.

    >>> import ipucnn
    >>> run = ipucnn.load("runs/mine")
    >>> run.labels
    ('0', '1', '2', '3', '4', '5', '6', '7', '8', '9')
    >>> import numpy as np
    >>> run.predict(np.zeros((2, 8, 8, 1), np.uint8)).shape
    (2, 10)

    Args:
        run: its path.
        checkpoint: which of the run's: "best", "last", or a file name; None for the last where there is one.
        model: the network's own file, "my_net.py:build", which is run; needed where it has layers of your own.

    Raises:
        UserError: as ``ipucnn infer`` says it.
    """
    from ipucnn.runs.trained import open_trained

    return Run(open_trained(_named("infer", run, checkpoint, model), reads_data=False), str(run))


def _named(
    command: str,
    run: Union[str, Path],
    checkpoint: Optional[str],
    model: Optional[str],
    options: Mapping[str, PlainValue] = MappingProxyType({}),
) -> "Named":
    from ipucnn.runs.trained import Named

    flags = _flags(command, options)
    if model is not None:
        flags["model_name"] = model
    return Named(command, str(run), flags, which=checkpoint, from_python=True)


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
        options: of ``ipucnn evaluate`` that all commands share, by their names, such as ``dataset_path``; ``dataset``
            also takes arrays, as :func:`train` does; of one pair all is evaluated.

    Returns:
        What ``ipucnn evaluate --json`` prints: ``measured``, ``classes``, ``confusion_matrix`` and others.

    Raises:
        UserError: as the command says it.
    """
    from ipucnn.runs.evaluate import EvaluateRequest, evaluate_run

    return evaluate_run(EvaluateRequest(_named("evaluate", run, checkpoint, model, options)))


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
        batch, opset, half, raw_uint8, probabilities, overwrite: as the command has them.
        options: of ``ipucnn export`` that all commands share, by their names.

    Returns:
        What stands in ``export.json``, and ``folder``.

    Raises:
        UserError: as the command says it; ``ThresholdError`` where the file does not compute what the run does.
    """
    from ipucnn.runs.export import ExportRequest, export_run

    request = ExportRequest(
        _named("export", run, checkpoint, model, options),
        str(format),
        batch=batch,
        opset=opset,
        half=half,
        raw_uint8=raw_uint8,
        probabilities=probabilities,
        output=None if output is None else expand(str(output)),
        overwrite=overwrite,
    )
    return export_run(request)


@_guarded
def read_history(run: Union[str, Path]) -> List[Dict[str, Any]]:
    """The rows of a run's ``metrics.jsonl``: one for each execution and validation, with ``event`` and
    ``weight_updates``.

    >>> import ipucnn
    >>> [row["weight_updates"] for row in ipucnn.read_history("runs/mine") if row["event"] == "validation"]
    [2, 4]

    Raises:
        DataError: the folder is no run.
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
        stages: to split into; None searches for the best use of the IPUs.
        system: to plan for; None for the smallest POD.
        options: of ``ipucnn plan-splits``, by their names.

    Raises:
        UserError: as the command says it; ``InfeasibleError`` where no plan fits.
    """
    from ipucnn.planning.plan import check_not_fitting, make_plan
    from ipucnn.planning.request import make_request
    from ipucnn.sessions.host.environment import import_tensorflow

    resolved = _request("plan-splits", model, options).resolve()
    request = make_request(resolved, stages=stages, system=system)
    made = make_plan(request, [], lambda note: None, import_tensorflow)
    check_not_fitting(made, request)
    return made


class Training:
    """A training run that begins when it is iterated over, which can be done once; see :func:`train`.

    Attributes:
        folder: the run folder.
        report: what ``report.json`` holds, once the run is over.
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
        """What ``report.json`` holds, once the run is over; before that nothing."""
        return self._run.final_report

    def __iter__(self) -> Iterator["RunEvent"]:
        """Trains, and gives each event as it happens.

        Raises:
            ConfigurationError: it was iterated over before.
        """
        # Not in the generator, whose first line runs only when the first event is asked for.
        if self._has_begun:
            raise ConfigurationError(
                f"this training has been iterated over before, and it trains only once; its run is {self.folder}",
                "call ipucnn.train() again for a new run; to read the events twice, keep them: "
                "events = list(ipucnn.train(...))",
            )
        self._has_begun = True
        return self._events()

    def _events(self) -> Iterator["RunEvent"]:
        from ipucnn.reports.runs import write_page_of
        from ipucnn.reports.train import draw_predictions
        from ipucnn.runs.recorder import Predicted

        with _as_the_command_line():
            for event in self._run.events():
                if isinstance(event, Predicted):
                    draw_predictions(self._run, event.pictures)
                yield event
            write_page_of(self._run)


@_guarded
def train(model: str, **options: PlainValue) -> Training:
    """Checks a training run as ``ipucnn train`` does, and gives what trains when it is iterated over.

    >>> import ipucnn
    >>> training = ipucnn.train("toy_model", dataset="digits", limit_train=64, num_epochs=1, seed=1, run_dir="runs/new")
    >>> names = [type(event).__name__ for event in training]
    >>> names[0], "ExecutionFinished" in names, "Validated" in names
    ('Started', True, True)
    >>> str(training.folder), training.report["trained_samples"]
    ('runs/new', 64)

    Args:
        model: a network of ``ipucnn models``.
        options: of ``ipucnn train``, by their names. ``dataset`` also takes arrays: (images, labels), of which a fifth
            of each class is held out, or (images, labels) for training and for evaluation; names of the classes after
            them. Images are uint8 [n, height, width] or [n, height, width, 1 or 3].

    Raises:
        UserError: as the command says it, here or while it trains.
    """
    from ipucnn.runs.start import is_cross_validation
    from ipucnn.runs.train import TrainingRun

    resolved = _request("train", model, options).resolve()
    if is_cross_validation(resolved):
        raise ConfigurationError(
            "kfold: ipucnn.train() trains one run, and a cross-validation is several",
            f"ipucnn train {shown_value(model)} --kfold N in a terminal",
        )
    if resolved.config.dry_run:
        raise ConfigurationError(
            "dry_run: ipucnn.train() checks a run when it is called, and trains when it is iterated over",
            "leave it out, and do not iterate over what is returned",
        )
    return Training(TrainingRun(resolved))


def _request(command: str, model: str, options: Mapping[str, PlainValue]) -> RunRequest:
    """The request of a command with options as keywords.

    Raises:
        ConfigurationError: an option that the command does not have.
    """
    from ipucnn.planning.pipeline_plan import read_plan

    recipe, file = options.get("config"), options.get("config_path")
    of_command = ("stages", "system") if command == "plan-splits" else ()
    return RunRequest(
        command,
        _flags(
            command,
            {key: value for key, value in options.items() if key not in ("config", "config_path")},
            of_command,
        ),
        model,
        config_name=None if recipe is None else str(recipe),
        config_path=None if file is None else str(file),
        read_plan=read_plan,
    )


def _flags(command: str, options: Mapping[str, PlainValue], others: Sequence[str] = ()) -> Dict[str, Any]:
    """Options as keywords, as they would be typed.

    Args:
        others: further keywords that there are, for the hint of an error.

    Raises:
        ConfigurationError: an option that the command does not have.
    """
    known = [spec.name for spec in specs_for(command) if spec.name != "model_name"]
    flags: Dict[str, Any] = {}
    for name, value in options.items():
        spec = find_spec(name)  # in any spelling that the command line takes
        if spec is None or spec.name not in known:
            raise ConfigurationError(
                f"`ipucnn {command}` has no option {name}",
                _hint_for(name, [*known, *others]) or f"`ipucnn {command} --help` lists them",
            )
        if spec.name == "dataset" and value is not None and not isinstance(value, (str, Path)):
            from ipucnn.datasets.sources.in_memory import keep

            value = keep(value, is_evaluated=command != "train")
        if value is not None:
            flags[spec.name] = _plain(value)
    return flags


def _hint_for(name: str, known: Sequence[str]) -> Optional[str]:
    """``did you mean 'x'?`` for a keyword, by what others call the option, then by its spelling."""
    meant = [option for option in _ALSO_CALLED.get(name, ()) if option in known]
    if meant:
        return "did you mean " + " or ".join(f"'{option}'" for option in meant) + "?"
    return did_you_mean(name, known)


def _plain(value: object) -> object:
    """A value with Python's own numbers in place of NumPy's, which a loop over arrays gives, and text for a path."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
