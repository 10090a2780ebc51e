"""Returns the same figures of every report: a benchmark's, a training run's, and Keras' own loop's."""

from typing import List, Optional, Sequence

from ipucnn.aliases import PlainDict
from ipucnn.benchmarking.records import Figures
from ipucnn.machine import peak_memory_bytes
from ipucnn.runs.compare import RunRecord


def figures_of_benchmark(report: PlainDict) -> Figures:
    """Returns the figures of what ``ipucnn benchmark --json`` prints."""
    measured, compiled = report["measured"], report.get("compilation") or {}
    speed, predicted = measured["images_per_s"], (report.get("predicted") or [{}])[0]
    return Figures(
        **figures_of_work(report["program"], compiled, report.get("input_shape")),
        device=report["device"]["name"],
        data=report["data"]["name"],
        images_per_s=speed["value"],
        images_per_s_lower=speed["lower"],
        images_per_s_upper=speed["upper"],
        step_s=measured["step_s"],
        compile_s=compiled.get("compile_s"),
        peak_memory_bytes=measured.get("peak_memory_bytes"),
        ratio_to_keras=((report.get("comparison") or {}).get("ratio") or {}).get("value"),
        predicted_images_per_s=predicted.get("images_per_s"),
        predicted_num_ipus=predicted.get("num_ipus"),
        notes=report.get("notes", []),
    )


def figures_of_run(report: PlainDict, run: RunRecord) -> Figures:
    """Returns the figures of what ``ipucnn train --json`` prints, and of the run's last epoch."""
    program, measured, compiled = report["program"], report["measured"], report["compilation"]
    images_per_s = measured["images_per_s"] or None
    first = run.weight_updates - int(program["weight_updates_per_epoch"] or 0)
    last_epoch = [row for row in run.rows("execution") if row["weight_updates"] > first]
    accuracies = [row["accuracy"] for row in last_epoch if "accuracy" in row]
    return Figures(
        **figures_of_work(program, compiled, report.get("input_shape")),
        device=compiled["device"]["name"],
        data=report["dataset"]["name"],
        images_per_s=images_per_s,
        # As in Keras' progress bar: a step of a training run is a micro-batch, whichever replica takes it.
        step_s=program["micro_batch_size"] / images_per_s if images_per_s else None,
        compile_s=compiled.get("compile_s"),
        peak_memory_bytes=measured.get("peak_memory_bytes"),
        training_accuracy=sum(accuracies) / len(accuracies) if accuracies else None,
        accuracy=(report.get("validation") or {}).get("accuracy"),
        notes=report.get("notes", []),
    )


def figures_of_fit(
    program: PlainDict,
    compiled: PlainDict,
    input_shape: Sequence[int],
    *,
    device: str,
    data: str,
    images_per_s: float,
    training_accuracy: Optional[float],
    accuracy: Optional[float],
    notes: List[str],
) -> Figures:
    """Returns the figures of a training by Keras' own loop, in this process.

    Args:
        program, compiled: the Program, and the numbers of parameters and MACs, as the reports have them.
        input_shape: height, width and channels of the images.
        device, data: names of the device and of the data set.
        images_per_s: the speed, without the first epoch.
        training_accuracy: the accuracy in the last epoch; None if Keras reports none.
        accuracy: the accuracy on the evaluation samples; None if none are evaluated.
        notes: what differs from the session's training.
    """
    return Figures(
        **figures_of_work(program, compiled, input_shape),
        device=device,
        data=data,
        images_per_s=images_per_s,
        step_s=program["micro_batch_size"] / images_per_s,
        peak_memory_bytes=peak_memory_bytes(),
        training_accuracy=training_accuracy,
        accuracy=accuracy,
        notes=notes,
    )


def figures_of_work(
    program: PlainDict, compiled: PlainDict, input_shape: Optional[Sequence[int]]
) -> PlainDict:
    """Returns the figures of the computed work."""
    height, width = input_shape[:2] if input_shape else (None, None)
    parameters, macs = (compiled.get(key) for key in ("num_trainable_parameters", "macs_per_sample"))
    keys = ("micro_batch_size", "gradient_accumulation_count", "num_replicas", "num_stages")
    return {
        **{key: program[key] for key in keys},
        "image_height": height,
        "image_width": width,
        "num_trainable_parameters": parameters,
        "macs_per_image": macs,
        "flop_per_parameter": 2.0 * macs * program["micro_batch_size"] / parameters
        if parameters and macs
        else None,
    }
