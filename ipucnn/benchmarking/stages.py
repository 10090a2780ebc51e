"""The input pipeline alone, stage by stage: how fast samples are read, decoded, augmented and batched.

Each stage is measured with all those before it, from the pipeline that training uses, cut off after the stage.
What a stage costs by itself is the difference to the one before.
"""

from typing import Any, Callable, Dict, List, Optional, Sequence

from ipucnn.benchmarking.measure import Execution, Side
from ipucnn.benchmarking.report import execution_rows
from ipucnn.benchmarking.statistics import paired_difference, throughput
from ipucnn.datasets.base import ArrayExamples, DataSource

METHOD = (
    "each stage is measured together with those before it, in turns; its own time per image is the difference to "
    "the one before, with all threads of the pipeline at work"
)
_WHAT_ARRAYS = {
    "read": "stored pixels gathered from memory, in the order of the epoch",
    "decode": "to floats of the network's size (the set is stored decoded)",
    "augment": "augmentation",
    "batch": "channels, range, labels, batches of {batch}",
}
_WHAT_FILES = {
    "read": "bytes of the encoded images, in the order of the epoch",
    "decode": "decoded, the centre resized to the network's size",
    "augment": "a random crop resized and mirrored instead of the centre",
    "batch": "channels, range, labels, batches of {batch}",
}
# Elements that are taken off the clock before each execution: from then on all threads are at work.
_LEAD_ELEMENTS = 2
_LEAD_SAMPLES = 8

MakeStage = Callable[[str, int], Any]
"""(stage, first sample) -> infinite tf.data.Dataset."""


def stage_names(augment: bool) -> List[str]:
    """The stages of a pipeline with or without augmentation, in order."""
    return ["read", "decode", "augment", "batch"] if augment else ["read", "decode", "batch"]


def describe_stage(name: str, source: DataSource, batch_size: int) -> str:
    """What happens in a stage, in words."""
    texts = _WHAT_ARRAYS if isinstance(source.train, ArrayExamples) else _WHAT_FILES
    return texts[name].format(batch=batch_size)


class Drain:
    """Takes elements of data sets inside one TensorFlow function: no Python between elements."""

    def __init__(self) -> None:
        import tensorflow as tf

        def take(iterator: Any, count: Any) -> Any:
            def body(i: Any, seen: Any) -> Any:
                first = tf.nest.flatten(iterator.get_next())[0]
                # The sum depends on the element, so that it is made and not only skipped.
                return i + 1, seen + tf.size(first, out_type=tf.int64)

            start = (tf.constant(0, tf.int64), tf.constant(0, tf.int64))
            return tf.while_loop(lambda i, _: i < count, body, start, parallel_iterations=1)[1]

        self._take = tf.function(take, autograph=False)

    def __call__(self, iterator: Any, num_elements: int) -> None:
        """Returns when so many elements were delivered."""
        import tensorflow as tf

        self._take(iterator, tf.constant(num_elements, tf.int64)).numpy()


class PipelineStage(Side):
    """The pipeline up to a stage; a unit is one sample.

    Every execution goes on in the data set where the last one ended, with a pipeline of its own that was running
    before the clock starts: nothing lies ready in buffers, and nothing runs on while other sides have their turn.

    Args:
        name: of the stage.
        make: the data set up to the stage, from a sample on.
    """

    samples_per_unit = 1

    def __init__(self, name: str, make: MakeStage) -> None:
        self.name, self._make, self._drain = name, make, Drain()
        self.granule = samples_of_element(make(name, 0), name)
        self._position = 0
        self._iterator: Optional[Any] = None

    def prepare(self, num_units: int) -> None:
        """Starts a pipeline and takes the first elements off the clock."""
        lead = max(_LEAD_ELEMENTS, _LEAD_SAMPLES // self.granule)
        self._iterator = iter(self._make(self.name, self._position))
        self._drain(self._iterator, lead)
        self._position += lead * self.granule + num_units

    def execute(self, num_units: int) -> None:
        """Takes so many samples."""
        self._drain(self._iterator, num_units // self.granule)

    def check(self) -> None:
        """Ends the pipeline, which stops its threads; errors in the data were raised by taking them."""
        self._iterator = None


def samples_of_element(dataset: Any, stage: str) -> int:
    """Samples of one element: single files until the last stage, batches otherwise."""
    spec = dataset.element_spec
    images = spec[0] if isinstance(spec, tuple) else spec
    whole = stage == "batch" or images.shape.rank == 4
    return int(images.shape[0]) if whole else 1


def pipeline_figures(
    source: DataSource,
    names: Sequence[str],
    executions: Sequence[Sequence[Execution]],
    predicted: Sequence[Dict[str, Any]],
    *,
    batch_size: int,
    num_parallel: Optional[int],
    seed: int,
) -> Dict[str, Any]:
    """``data_pipeline`` of a report.

    Args:
        source: the data set.
        names: of the stages measured.
        executions: of each stage, paired by round.
        predicted: the predicted columns.
        batch_size, num_parallel: of the pipeline.
        seed: of the bootstrap.
    """
    stages = []
    for index, (name, rows) in enumerate(zip(names, executions)):
        samples, seconds = [e.samples for e in rows], [e.wall_s for e in rows]
        before = executions[index - 1] if index else None
        own = paired_difference(
            (samples, [e.samples for e in before] if before else None),
            (seconds, [e.wall_s for e in before] if before else None),
            seed,
        )
        stages.append(
            {
                "name": name,
                "what": describe_stage(name, source, batch_size),
                "images_per_s": throughput(samples, seconds, seed).to_dict(),
                "own_s_per_image": own.to_dict(),
                "executions": execution_rows(list(rows)),
            }
        )
    last = stages[-1]["images_per_s"] if stages else None
    return {
        "method": METHOD,
        "batch_size": batch_size,
        "num_parallel": num_parallel,
        "stages": stages,
        "feeds": [_feeds(p, last) for p in predicted if last and p["images_per_s"]],
    }


def _feeds(prediction: Dict[str, Any], measured: Dict[str, Any]) -> Dict[str, Any]:
    """How many IPUs take the images as fast as the pipeline delivers them."""
    each = prediction["images_per_s"] / prediction["num_ipus"]
    return {
        "system": prediction["system"],
        "precision": prediction["precision"],
        "images_per_s_per_ipu": each,
        "num_ipus": {key: None if value is None else value / each for key, value in measured.items()},
    }
