"""Many combinations on the test double, through the CLI: a pairwise selection, and some compared with the host.

``pytest -m slow tests/test_poplar_matrix.py`` runs all of them; a few small ones always run.
"""

import json
import random
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
from poplar_double import installed
from poplar_double.facts import FACTS

from ipucnn.models.registry import get_model
from ipucnn.training.checkpoints import load_checkpoint

FACTORS: Dict[str, List[Any]] = {
    "model": [
        "toy_model",
        "lenet",
        "mnist_cnn",
        "cifar_resnet8",
        "unet",
        "resnet18",
        "resnet50v2",
        "vgg16",
        "mobilenet",
        "mobilenetv3-small",
        "efficientnet-b0",
        "efficientnet-b0-g16",
    ],
    "norm": ["batch_norm", "group_norm", "none"],
    "stages": ["1", "2 Grouped", "2 Interleaved", "2 Sequential", "4 Grouped"],
    "replicas": [1, 2, 4],
    "optimizer": ["sgd", "lars", "adam", "adamw", "rmsprop"],
    "reduction": ["sum", "mean", "running_mean"],
    "precision": ["32.32", "16.16", "16.32"],
    "dropout_layer": ["poprand", "stateless"],
    "transfer": ["float", "eight-bit-transfer", "accelerator-side-preprocess", "fused-preprocessing"],
    "dbn": [1, 2],
    "validation": ["one", "pipelined"],
    "memory": ["none", "one", "per stage"],
    "sdk": ["3.0", "3.4"],
    "padding": [False, True],
}


def is_legal(row: Dict[str, Any]) -> bool:
    """Whether this program allows the combination; other tests cover the refusals."""
    record = get_model(row["model"])
    if record.norms == ("none",) and row["norm"] != "none":
        return False
    pipelined = row["stages"] != "1"
    if row["dbn"] > 1 and (pipelined or row["replicas"] == 1 or row["norm"] != "batch_norm"):
        return False
    if row["validation"] == "pipelined" and not pipelined:
        return False
    if row["memory"] == "per stage" and not pipelined:
        return False
    # The fused operation needs red, green and blue.
    if row["transfer"] == "fused-preprocessing" and (
        record.input_shape[2] != 3 or record.input_range == "caffe"
    ):
        return False
    # Dice couples the samples of a micro-batch.
    return not (row["padding"] and row["model"] == "unet")


def flags_of(row: Dict[str, Any]) -> List[str]:
    """Returns the options of a combination: two executions of one weight update at the smallest input."""
    params = '{"momentum":0.9}' if row["optimizer"] == "sgd" else "{}"
    record = get_model(row["model"])
    stages, _, schedule = row["stages"].partition(" ")
    count = int(stages) * {"Grouped": 2, "Interleaved": 1, "Sequential": 1}.get(schedule, 1)
    count = max(count, 2)
    micro_batch = row.get("micro_batch", 1 if row["model"] == "unet" else 2)
    global_batch = count * row["replicas"] * micro_batch
    size = max(record.min_size, 16)
    flags = f"--micro-batch-size {micro_batch} --gradient-accumulation-count {count} --steps-per-execution {count}"
    flags += (
        f" --num-replicas {row['replicas']} --limit-train {global_batch - int(row['padding'])} --limit-eval 4"
    )
    flags += f" --dataset random --image-size {size} --num-epochs 2 --seed 7"
    flags += f" --learning-rate {row.get('learning_rate', 0.001)}"
    flags += f" --optimizer {row['optimizer']} --optimizer-params {params}"
    flags += f" --precision {row['precision']} --loss-scaling 8"
    flags += f" --gradient-accumulation-reduction-method {row['reduction']} --norm-layer {row['norm']}"
    flags += f" --dropout-layer {row['dropout_layer']} --dbn-replica-group-size {row['dbn']} --weight-decay 0"
    flags += " --lr-schedule const --lr-schedule-params {}"
    if stages != "1":
        flags += f" --ipus-per-replica {stages} --pipeline-schedule {schedule} --recomputation"
    if row["transfer"] != "float":
        flags += f" --accelerator-side-preprocess --{row['transfer']}"
    if row["validation"] == "pipelined":
        flags += " --pipeline-validation-model"
    if row["memory"] != "none":
        flags += " --available-memory-proportion" + " 40" * (
            int(stages) if row["memory"] == "per stage" else 1
        )
    if row["padding"]:
        flags += " --pad-dataset"
    if row["model"] == "unet":
        flags += " --base-filters 2"
    return flags.split()


def check(row: Dict[str, Any], report: Any) -> None:
    """Trains two executions and validates, then evaluates and infers from the run folder."""
    with installed(sdk=row["sdk"]) as machine:
        trained = report("train", row["model"], "--run-dir", "run", *flags_of(row))
        assert trained["program"]["num_executions"] == 2 and len(machine.calls("fit")) == 2
        assert np.isfinite(trained["validation"]["loss"])
    first = load_checkpoint(Path("run/checkpoints/last.npz"))
    assert first.meta["weight_updates"] == 2
    assert all(value.dtype == np.float32 and np.isfinite(value).all() for value in first.weights.values())
    evaluate = ["evaluate", "run", "--limit-eval", 4]
    with installed(sdk=row["sdk"]):
        loss = report(*evaluate)["measured"]["loss"]
        expected = trained["validation"]["loss"]
        if row["model"] == "unet":
            # The loss of whole images; validation uses the patch that the network sees of each.
            expected = report(*evaluate, "--device", "cpu")["measured"]["loss"]
        tolerance = 1e-3 if row["precision"] == "32.32" else 5e-2
        assert loss == pytest.approx(expected, rel=tolerance, abs=tolerance)
        if row["model"] != "unet":
            assert len(report("infer", "run", "--split", "eval", "--limit-eval", 2)["results"]) == 2


def name_of(row: Dict[str, Any]) -> str:
    return "-".join(
        str(row[k]).replace(" ", "") for k in ("model", "norm", "stages", "replicas", "precision")
    )


ROWS = json.loads((Path(__file__).parent / "data" / "poplar_pairs.json").read_text(encoding="utf-8"))
_QUICK = (
    "toy_model-none-2Sequential-1-32.32",
    "toy_model-none-2Interleaved-2-16.16",
)
"""Programs of a network that is compiled in seconds: a pipeline of each kind of precision, on each SDK."""


# Not finite after the first update: gradients beyond the range of 16 bits, whatever the optimizer and the loss scale.
# Batch norm of two nearly equal numbers multiplies their gradients by up to 1 / sqrt(epsilon); in the last blocks of
# this network at 32x32 a channel is one pixel of each of two samples.  On the host `train --fp-exceptions` names the
# gradient of conv5_block1_out.
_OVERFLOWS = ("resnet50v2-batch_norm-2Interleaved-1-16.16",)


@pytest.mark.slow_cases("toy_model-none-2Interleaved-2-16.16")
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if name_of(row) in _QUICK else pytest.mark.slow) for row in ROWS],
    ids=name_of,
)
def test_pairwise_selection(row, run, report):
    if name_of(row) in _OVERFLOWS:
        with installed(sdk=row["sdk"]):
            code, _, err = run("train", row["model"], "--run-dir", "run", *flags_of(row))
        assert code == 2 and err.count("error:") == 1 and "nan" in err, err
        assert not list(Path("run").glob("checkpoints/*"))
        return
    check(row, report)


# Differences from the following combination.
_ONE_IPU = {
    "model": "cifar_resnet8",
    "norm": "batch_norm",
    "stages": "1",
    "replicas": 1,
    "optimizer": "sgd",
    "reduction": "mean",
    "precision": "32.32",
    "dropout_layer": "stateless",
    "transfer": "float",
    "dbn": 1,
    "validation": "one",
    "memory": "none",
    "padding": False,
    "micro_batch": 4,
}
COMPARED: Dict[str, Dict[str, Any]] = {
    "lenet": {"model": "lenet", "norm": "none"},
    "cifar_resnet8": {"replicas": 2},
    "distributed batch norm": {"replicas": 4, "dbn": 2, "transfer": "eight-bit-transfer"},
    "2 stages Grouped": {"stages": "2 Grouped"},
    # A rate at which half an update exceeds the limit of 16 bits.
    "2 stages Interleaved": {
        "stages": "2 Interleaved",
        "norm": "group_norm",
        "precision": "16.16",
        "learning_rate": 0.01,
    },
    "2 stages Sequential": {"stages": "2 Sequential", "precision": "16.32", "learning_rate": 0.01},
    "4 stages Grouped": {"stages": "4 Grouped", "norm": "group_norm", "validation": "pipelined"},
    "4 stages Interleaved": {"stages": "4 Interleaved", "norm": "group_norm"},
    "4 stages Sequential": {"stages": "4 Sequential", "replicas": 2},
    "efficientnet-b0": {"model": "efficientnet-b0", "replicas": 2, "norm": "group_norm"},
    "unet": {"model": "unet", "stages": "2 Grouped", "norm": "none", "micro_batch": 1},
}


def far(on_ipus: Any, on_host: Any, precision: str) -> float:
    """Returns the largest difference; for 16 bits in steps between two numbers at the size of the weight."""
    difference = np.abs(on_ipus - on_host)
    if precision != "32.32":
        largest = np.abs(on_host).max().astype(np.float16)
        difference = difference / max(np.spacing(largest), 2.0**-14)
    return float(difference.max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name == "lenet" else pytest.param(name, marks=pytest.mark.slow) for name in COMPARED],
)
def test_training_evaluation_and_inference_equal_the_host(short_benchmarks, report, name):
    """The host computes micro-batch by micro-batch, as IPUs do; a benchmark on the double only shows that it ran."""
    row: Dict[str, Any] = {**_ONE_IPU, **COMPARED[name]}
    flags = [*flags_of(row), "--dropout", 0, "--precise-batch-norm", 0]

    def results(folder: str, device: str, *more: Any) -> Any:
        """Returns the trained weights, the loss of the evaluation, and the inferred classes or masks."""
        report("train", row["model"], *flags, "--device", device, *more, "--run-dir", folder)
        rest = [folder, "--limit-eval", 4, "--device", device]
        loss = report("evaluate", *rest)["measured"]["loss"]
        infer = ["infer", *rest, "--split", "eval"]
        if row["model"] == "unet":
            report(*infer, "--output", f"masks-{folder}")
            answers = [path.read_bytes() for path in Path(f"masks-{folder}").glob("*mask.tif")]
        else:
            answers = [one["predictions"][0]["class"] for one in report(*infer)["results"]]
        return load_checkpoint(Path(folder, "checkpoints/last.npz")).weights, loss, answers

    on_host, host_loss, host_answers = results("host", "cpu", "--fused-micro-batches", row["dbn"])
    limit, tolerance = (1e-6, 1e-4) if row["precision"] == "32.32" else (4.0, 0.02)
    words = (
        f"benchmark {row['model']} --training --host-generated-data --executions 3 --min-time 0 --dropout 0"
    )
    kept = ("--micro-batch-size", "--num-replicas", "--gradient-accumulation-count", "--steps-per-execution")
    kept = (*kept, "--image-size", "--precision", "--norm-layer", "--ipus-per-replica", "--pipeline-schedule")
    of_benchmark = [word for pair in zip(flags, flags[1:]) if pair[0] in kept for word in pair]
    # The programs that always run are on both SDKs, and so are the slow comparisons.
    for sdk in ("3.4",) if name == "lenet" else ("3.0", "3.4"):
        with installed(sdk=sdk):
            on_ipus, loss, answers = results(sdk, "ipu")
            benchmark = report(*words.split(), *of_benchmark, "--run-dir", f"benchmark-{sdk}")
        assert list(on_ipus) == list(on_host)
        for key, value in on_host.items():
            assert far(on_ipus[key], value, row["precision"]) <= limit, key
        assert loss == pytest.approx(host_loss, rel=tolerance)
        assert answers == host_answers and answers
        assert benchmark["device"]["kind"] == "ipu" and benchmark["measured"]["images_per_s"]["value"] > 0


def test_sdks_between_those_of_the_comparison_have_the_same_facts():
    """3.1 only lacks TF_POPLAR_FLAGS --use_on_demand, which users set and the session does not."""
    lacking = {sdk: FACTS["absent_in"].get(sdk, {}) for sdk in ("3.1", "3.2", "3.3", "3.4")}
    assert lacking == {"3.1": {"flags": ["use_on_demand"]}, "3.2": {}, "3.3": {}, "3.4": {}}


def test_every_legal_pair_occurs():
    assert set(_QUICK) <= set(map(name_of, ROWS))
    assert len(ROWS) >= 60 and all(set(row) == set(FACTORS) and is_legal(row) for row in ROWS)
    rng = random.Random(0)
    pairs = {(a, row[a], b, row[b]) for row in ROWS for a in row for b in row}
    for _ in range(4000):
        row = {name: rng.choice(values) for name, values in FACTORS.items()}
        if is_legal(row):
            missing = [
                pair for pair in ((a, row[a], b, row[b]) for a in row for b in row) if pair not in pairs
            ]
            assert not missing, missing
