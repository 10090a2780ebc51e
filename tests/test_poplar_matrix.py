"""Many combinations on the test double: a pairwise selection that trains, evaluates and infers, through the CLI.

``pytest -m slow tests/test_poplar_matrix.py`` runs the whole selection; two small ones always run.
"""

import json
import random
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
from poplar_double import installed

from ipucnn import cli
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
    record = get_model(row["model"])
    stages, _, schedule = row["stages"].partition(" ")
    count = int(stages) * {"Grouped": 2, "Interleaved": 1, "Sequential": 1}.get(schedule, 1)
    count = max(count, 2)
    micro_batch = 1 if row["model"] == "unet" else 2
    global_batch = count * row["replicas"] * micro_batch
    size = max(record.min_size, 16)
    flags = f"--micro-batch-size {micro_batch} --gradient-accumulation-count {count} --steps-per-execution {count}"
    flags += (
        f" --num-replicas {row['replicas']} --limit-train {global_batch - int(row['padding'])} --limit-eval 4"
    )
    flags += f" --dataset random --image-size {size} --num-epochs 2 --seed 7 --learning-rate 0.001"
    flags += f" --optimizer {row['optimizer']} --optimizer-params {{}} --precision {row['precision']} --loss-scaling 8"
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


def check(row: Dict[str, Any], folder: Any, capfd: Any) -> None:
    """Trains two executions and validates, then evaluates and infers from the run folder."""
    run_dir = str(folder / "run")
    with installed(sdk=row["sdk"]) as machine:
        code = cli.run(["train", row["model"], "--run-dir", run_dir, "--json", *flags_of(row)])
        out, err = capfd.readouterr()
        assert code == 0, (row, err)
        report = json.loads(out)
        assert report["program"]["num_executions"] == 2 and len(machine.calls("fit")) == 2
        assert np.isfinite(report["validation"]["loss"])
    first = load_checkpoint(folder / "run" / "checkpoints" / "last.npz")
    assert first.meta["weight_updates"] == 2
    assert all(value.dtype == np.float32 and np.isfinite(value).all() for value in first.weights.values())
    with installed(sdk=row["sdk"]):
        code = cli.run(["evaluate", run_dir, "--json", "--limit-eval", "4"])
        out, err = capfd.readouterr()
        assert code == 0, (row, err)
        loss = json.loads(out)["measured"]["loss"]
        expected = report["validation"]["loss"]
        if row["model"] == "unet":
            # The loss of whole images; validation uses the patch that the network sees of each.
            code = cli.run(["evaluate", run_dir, "--json", "--limit-eval", "4", "--device", "cpu"])
            out, err = capfd.readouterr()
            assert code == 0, (row, err)
            expected = json.loads(out)["measured"]["loss"]
        tolerance = 1e-3 if row["precision"] == "32.32" else 5e-2
        assert loss == pytest.approx(expected, rel=tolerance, abs=tolerance)
        if row["model"] != "unet":
            code = cli.run(["infer", run_dir, "--split", "eval", "--limit-eval", "2", "--json"])
            out, err = capfd.readouterr()
            assert code == 0 and len(json.loads(out)) == 2, (row, err)


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


# Not finite after the first update: gradients beyond the range of 16 bits, whatever the optimizer and the loss scale;
# see test_batch_norm_of_two_numbers_overflows_16_bits.  On the host `train --fp-exceptions` names the gradient of
# conv5_block1_out.
_OVERFLOWS = ("resnet50v2-batch_norm-2Interleaved-1-16.16",)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if name_of(row) in _QUICK else pytest.mark.slow) for row in ROWS],
    ids=name_of,
)
def test_pairwise_selection(row, tmp_path, capfd):
    if name_of(row) in _OVERFLOWS:
        with installed(sdk=row["sdk"]):
            code = cli.run(["train", row["model"], "--run-dir", str(tmp_path / "run"), *flags_of(row)])
        err = capfd.readouterr().err
        assert code == 2 and err.count("error:") == 1 and "nan" in err and "Traceback" not in err, err
        assert not list(tmp_path.glob("run/checkpoints/*"))
        return
    check(row, tmp_path, capfd)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "is_beyond"), [(2, True), (8, False)])
def test_batch_norm_of_two_numbers_overflows_16_bits(batch, is_beyond):
    """Batch norm of two nearly equal numbers multiplies their gradients by up to 1 / sqrt(epsilon).

    In the last blocks of ResNet-50 at 32x32 a channel is a pixel of each sample; in 32 bits the gradients of two
    samples are beyond 65504, the largest number of 16 bits, and those of eight below 1.
    """
    import tensorflow as tf
    from tensorflow import keras

    from ipucnn.models.build import BuildOptions, build_model

    network = build_model(
        get_model("resnet50v2"), BuildOptions(input_shape=(32, 32, 3), num_classes=10, norm="batch", seed=7)
    )
    rng = np.random.default_rng(0)
    images, labels = rng.normal(0, 1, (batch, 32, 32, 3)).astype(np.float32), rng.integers(0, 10, batch)
    inner = keras.Model(network.inputs, [network.get_layer("conv5_block1_out").output, *network.outputs])
    with tf.GradientTape() as tape:
        features, logits = inner(tf.constant(images), training=True)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    largest = float(tf.reduce_max(tf.abs(tape.gradient(loss, features))))
    assert (largest > 65504) == is_beyond and (largest < 1) != is_beyond


def test_every_legal_pair_occurs():
    assert set(_QUICK) <= set(map(name_of, ROWS))
    assert len(ROWS) >= 60 and all(set(row) == set(FACTORS) and is_legal(row) for row in ROWS)
    rng = random.Random(0)
    pairs = {(a, row[a], b, row[b]) for row in ROWS for a in row for b in row}
    for _ in range(20000):
        row = {name: rng.choice(values) for name, values in FACTORS.items()}
        if is_legal(row):
            missing = [
                pair for pair in ((a, row[a], b, row[b]) for a in row for b in row) if pair not in pairs
            ]
            assert not missing, missing
