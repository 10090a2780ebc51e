"""``ipucnn train --dry-run``: prints the program and the learning rate's curve, trains nothing, leaves no files."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.data_sets import noise, open_pairs, verified, write_class_folders, write_mnist, write_pairs
from support.refusals import Refusal, check_refused
from support.trained_runs import train

from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import resolve
from ipucnn.datasets.base import DatasetInfo
from ipucnn.datasets.images import conversions
from ipucnn.datasets.repeated import trained_and_evaluated
from ipucnn.reports.dry_run import draw_schedule, schedule_curve
from ipucnn.runs.setup import learning_rates
from ipucnn.runs.train import TrainingRun
from ipucnn.training.program import make_program
from ipucnn.training.schedules import make_schedule

TRAIN = ["train", "lenet", "--dataset", "digits", "--device", "cpu", "--seed", "3", "--num-epochs", "2"]


def rows_of(out):
    """Returns first column -> second, of the table on stdout."""
    return dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in out.splitlines() if line.strip())


@pytest.mark.slow_cases("cifar_resnet8-cifar100-50000-10000")
@pytest.mark.parametrize(
    "model, name, train_images, eval_images",
    [
        ("resnet50", "imagenet", 1_281_167, 50_000),
        ("cifar_resnet8", "cifar10", 50_000, 10_000),
        ("cifar_resnet8", "cifar100", 50_000, 10_000),
        ("lenet", "mnist", 60_000, 10_000),
    ],
)
def test_dry_run_uses_the_published_size_of_an_absent_set(
    run, report, model, name, train_images, eval_images
):
    words = [model, "--dataset", name, "--download", "--device", "cpu", "--dry-run", "--json"]
    code, out, err = run("train", *words)
    assert code == 0, err
    assert "its published size stands for it" in err
    whole, part = json.loads(out), report("train", *words, "--limit-train", "10%")
    assert (whole["dataset"]["train"], whole["dataset"]["evaluation"]) == (train_images, eval_images)
    program = whole["program"]
    assert program["samples_per_epoch"] + program["samples_discarded_per_epoch"] == train_images
    assert part["dataset"]["train"] == round(train_images / 10)
    assert os.listdir() == []


def test_a_dry_run_of_a_cross_validation_shows_its_first_fold(run, report):
    code, out, err = run(*TRAIN, "--dry-run", "--kfold", "3")
    assert code == 0, err
    assert "1, 2, 3; shown is fold 1" in out and "1,198 train, 599 evaluation" in out
    assert report(*TRAIN, "--dry-run", "--kfold", "3", "--fold", "2")["folds"] == [2]
    assert os.listdir() == []


def test_warm_up_longer_than_the_run_is_warned_of(run):
    for epochs, is_warned in ((3, True), (2, False)):
        warmup = f"{{warmup_mode: shift, warmup_epochs: {epochs}}}"
        code, _, err = run(*TRAIN, "--dry-run", "--lr-warmup-params", warmup)
        assert code == 0 and ("warm-up of 3 epochs is longer than the run, 2 epochs" in err) == is_warned


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-epochs 3 --early-stopping 1", ""),  # after the second of three validations
        (
            "--num-epochs 3 --early-stopping 2",
            "--early-stopping 2 cannot end this run early: it has 3 validations",
        ),
        ("--num-epochs 4 --validation-freq 4 --early-stopping 1", "it has 1 validation\n"),
    ],
)
def test_patience_that_cannot_end_the_run_is_warned_of(run, words, said):
    code, _, err = run("train", "toy_model", "--dataset", "digits", *words.split(), "--dry-run")
    assert code == 0 and said in err and ("cannot end" in err) == bool(said)


def test_patience_of_a_preset_is_no_error_without_validations(here, run):
    Path("m.yml").write_text("mine:\n  early-stopping: 2\n")
    words = "--dataset digits --config mine --config-path m.yml --no-validation --dry-run"
    code, _, err = run("train", "toy_model", *words.split())
    assert code == 0 and "cannot end" not in err


@pytest.mark.parametrize("patchwise", [True, False], ids=["data", "facts of a checkpoint"])
def test_no_image_with_masks_is_cut_to_its_centre(patchwise):
    facts = dict(num_classes=2, image_shape=(None, None, 1), num_train=1, num_eval=1, class_names=("a", "b"))
    info = DatasetInfo(
        "x", "segmentation", **facts, location="", mean=(0.0,), std=(1.0,), patchwise=patchwise
    )
    assert conversions(info, (284, 284, 1)) == []


def test_what_images_lose_on_their_way_to_the_input_is_said(here, report, run):
    """A part of photographs, and their colours; a set in memory keeps its whole images."""
    write_class_folders(Path("photos"), {(part, name): 2 for part in ("train", "val") for name in ("a", "b")})
    grey = "colours, if there are any, become grey: the network takes one channel"
    centre = " sees the centre of each image, 88% of the width and height of its largest part shaped 32x16"
    words = ("--dataset", "photos", "--image-size", "32x16", "--micro-batch-size", 2)
    first, second, third = report("train", "lenet", *words, "--dry-run")["notes"]
    assert (
        "cut at random, and mirrored left to right half of the time (--augment, from the preset); --no"
        in third
    )
    assert first == f"evaluation{centre}; training sees random parts" and second == grey
    assert report("train", "lenet", *words, "--no-augment", "--dry-run")["notes"] == [
        f"the network{centre}",
        grey,
    ]
    assert report("train", "toy_model", "--dataset", "digits", "--dry-run")["notes"] == []
    code, _, err = run(
        "train", "lenet", *words, "--num-epochs", 1, "--seed", 1, "--run-dir", "r", columns=400
    )
    assert code == 0 and f"note: {first}\n" in err and f"note: {grey}\n" in err
    assert json.loads(Path("r/report.json").read_text())["notes"] == [first, second, third]
    notes = report("evaluate", "r")["notes"]
    assert notes[-2:] == [f"the network{centre}", grey]


def test_evaluation_images_that_are_trained_on_are_counted(here, report, run):
    """Equal files in class folders, in all folds together, and equal pixels of masks' images and of arrays."""

    def lines(*words):
        found = report("train", *words, "--dry-run")["warnings"]
        for command in re.findall("`(ipucnn verify-dataset .*)`", "\n".join(found)):
            assert "leakage" in run(*shlex.split(command)[1:])[1]
        return [
            line.partition(" among the training")[0] for line in found if "scores come out too high" in line
        ]

    write_class_folders(Path("set"), {(part, name): 3 for part in ("train", "val") for name in ("a", "b")})
    words = ("toy_model", "--dataset", "set", "--image-size", 16, "--micro-batch-size", 2)
    assert lines(*words) == []
    shutil.copy("set/train/a/0.png", "set/val/a/again.png")
    assert lines(*words) == ["1 of 7 evaluation images is"]
    shutil.copy("set/train/b/1.png", "set/val/a/1.png")  # in another class, in place of another file
    assert lines(*words) == ["2 of 7 evaluation images are"]
    assert "leakage" in verified("imagefolder", "set")[0]
    # Large files of one size, most of whose bytes are equal, are not taken for equal files.
    large = np.random.RandomState(7).randint(0, 256, (300, 300, 3)).astype(np.uint8)
    for folder in ("train", "val"):
        Image.fromarray(large).save(f"set/{folder}/a/large.bmp")
        large[200, 7] ^= 1
    assert lines(*words) == ["2 of 8 evaluation images are"]
    shutil.copy("set/train/a/large.bmp", "set/val/b/large.bmp")
    assert lines(*words) == ["3 of 9 evaluation images are"]
    pairs = [(noise(k % 4, 16, 16), np.eye(16, dtype=np.uint8)) for k in range(5)]  # the last is the first
    masks = open_pairs("imagemasks", write_pairs(Path("masks"), pairs))
    (line,) = trained_and_evaluated(masks, "ipucnn verify-dataset masks")
    assert line.startswith("1 of 1 evaluation image is among")
    Path("arrays.py").write_text(
        "import numpy as np\n\n"
        "def load():\n"
        "    images = np.random.RandomState(1).randint(0, 256, (8, 16, 16, 1)).astype(np.uint8)\n"
        "    labels = np.arange(8) % 2\n"
        "    return (images, labels), (np.concatenate([images[:3], 255 - images[:2]]), labels[:5])\n"
    )
    assert lines("toy_model", "--dataset", "arrays.py:load", "--micro-batch-size", 2) == [
        "3 of 5 evaluation images are"
    ]


SMALL = "lenet --num-epochs 2 --micro-batch-size 8 --limit-train"


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (f"{SMALL} 100 --ckpts-per-epoch 4",
         {"weight updates": "12 per epoch x 2 epochs", "executions": "8, each of 3 weight updates",
          "validation": "after every 4 executions"}),
        (f"{SMALL} 96 --ckpts-per-epoch 1/4",
         {"checkpoints": "at the end", "validation": "after every execution"}),
        (f"{SMALL} 96 --num-epochs 3 --ckpts-per-epoch 1/2 --logs-per-epoch 1",
         {"checkpoints": "after every 2 executions and at the end"}),
        (f"{SMALL} 96 --ckpts-per-epoch 1 --logs-per-epoch 1", {"checkpoints": "after every execution"}),
        ("lenet --num-epochs 2 --micro-batch-size 1200 --weight-updates-per-epoch 2000",
         {"global batch": "1,200 = micro-batch 1,200 x 1 accumulated x 1 replica",
          "executions": "2, each of 2,000 weight updates"}),
        ("lenet --precision 16.32", {"precision": "16.32, stochastic rounding OFF"}),
        ("cifar_resnet8 --norm-layer '{name: custom_batch_norm, momentum: 0.9}' --precision 16.16 "
         "--validation-micro-batch-size 40 --stochastic-rounding RI --loss-scaling 128",
         {"precision": "16.16, stochastic rounding RI, loss scale 128",
          "norm layer": "custom_batch_norm (momentum 0.9)",
          "validation batch": "40 = micro-batch 40 x 1 replica"}),
    ],
)  # fmt: skip
def test_dry_run_prints_the_program_and_leaves_no_files(run, words, rows):
    words = f"{words} --dataset digits --device cpu --dry-run"
    code, out, err = run("train", *shlex.split(words))
    assert code == 0, err
    shown = rows_of(out)
    assert {name: shown[name] for name in rows} == rows
    assert shown["device"].startswith("CPU") and "runs/" in out
    # The line before the run has the same program.
    assert "nothing was trained or written" in err and f"global batch {shown['global batch']}" in " ".join(
        err.split()
    )
    assert shown["executions"].replace(", each of", " executions of") in " ".join(err.split())
    assert os.listdir() == []


@pytest.mark.slow
def test_dry_run_writes_only_the_picture(run):
    code, _, err = run(*TRAIN, "--dry-run", "--plot-schedule", "lr.png", "--limit-train", "64")
    assert code == 0 and "lr.png" in err
    (path,) = Path().iterdir()
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_a_stream_of_any_name_gets_a_png(run):
    os.mkfifo("lr.txt")
    with subprocess.Popen(["cat", "lr.txt"], stdout=subprocess.PIPE) as reader:
        code, _, err = run(*TRAIN, "--dry-run", "--plot-schedule", "lr.txt", "--limit-train", "64")
        assert code == 0, err
        assert reader.stdout.read(8) == b"\x89PNG\r\n\x1a\n"
        reader.stdout.read()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Trains a run of two epochs of two weight updates each to its end."""
    line = "lenet --dataset digits --device cpu --seed 3 --num-epochs 2 --limit-train 64 --limit-eval 8"
    return train(tmp_path_factory.mktemp("finished") / "run", line, lightly=True)


@pytest.mark.slow
def test_dry_run_shows_where_a_run_continues(run, finished):
    files = sorted((p, p.stat().st_mtime_ns) for p in finished.rglob("*"))
    for options, is_finished, text in (
        ([], True, "the run is finished"),
        (["--num-epochs", "3"], False, "after weight update 4 of 6"),
    ):
        command = ["train", "--resume", "--run-dir", finished, "--dry-run", *options]
        report = json.loads(run(*command, "--json")[1])
        assert (report["finished"], report["continues_after"]) == (is_finished, 4)
        code, out, _ = run(*command)
        assert code == 0 and text in out
    assert sorted((p, p.stat().st_mtime_ns) for p in finished.rglob("*")) == files


@pytest.mark.slow
def test_dry_run_of_a_continued_run_uses_the_published_size_of_an_absent_set(run, lightly):
    write_mnist(Path("data"))
    words = "train lenet --dataset mnist --dataset-path data --device cpu --limit-train 16 --limit-eval 8"
    assert run(*words.split(), "--micro-batch-size", 8, "--run-dir", "r")[0] == 0
    shutil.rmtree("data")
    resume = ("train", "--resume", "--run-dir", "r", "--num-epochs", "9")
    Path("data").mkdir()
    check_refused(run, Refusal(resume, "data set mnist is not in data", code=3))
    code, out, err = run(*resume, "--dry-run")
    assert code == 0, err
    assert "its published size stands for it" in err and "after weight update" in out


def test_dry_run_refuses_unusable_checkpoints(run, finished, monkeypatch):
    resume = ["train", "--resume", "--run-dir", finished, "--dry-run", "--num-epochs"]
    epochs = Refusal([*resume, 1], "--num-epochs 1 are 2 weight updates", "use --num-epochs 2, or more")
    check_refused(run, epochs, unchanged=[finished])
    # Another run is named before anything that its checkpoint fixes, such as groups that two workers cannot share.
    words = "--limit-train 64 --limit-eval 8 --learning-rate 0.7 --max-workers 2 --run-dir other --resume --dry-run"
    other = [*TRAIN, *words.split(), "--checkpoint-input-dir", finished / "checkpoints"]
    check_refused(run, Refusal(other, "is of another run: learning-rate"), unchanged=[finished])
    monkeypatch.setattr("ipucnn.runs.context.fingerprint", lambda source: "of other images")
    data = Refusal([*resume, 3], "is not as it was for")
    check_refused(run, data, unchanged=[finished])


@pytest.mark.slow
def test_tensorflow_starts_as_in_a_run_if_the_network_is_built(tmp_path):
    """It is silent, and has the requested number of devices."""
    args = ["mnist_cnn", *TRAIN[2:], "--dropout", "0.1", "--gradient-accumulation-count", "2"]
    env = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-m", "ipucnn", "train", *args, "--devices", "2", "--dry-run"],
        cwd=str(tmp_path),
        env=env,
        capture_output=True,
    )
    printed = done.stderr.decode()
    assert done.returncode == 0, printed
    assert not re.search(r"^[IWEF]\d{4} |absl|oneDNN|CUDA", printed, re.MULTILINE), printed


def test_long_run_takes_no_more_memory_than_a_part_of_it():
    """The largest rate of 3 million weight updates is inside a ramp under a falling schedule."""
    flags = {"limit_train": "32", "micro_batch_size": "1", "num_epochs": "100000", "learning_rate": "0.3"}
    flags.update(lr_warmup_params="{warmup_mode: mask, warmup_epochs: 60000}", dataset="digits", device="cpu")
    plan = TrainingRun(resolve("train", flags, model="lenet"))
    schedule, sizes = plan.context.schedule, []
    whole = schedule(np.arange(plan.context.program.num_weight_updates))
    plan.context = dataclasses.replace(
        plan.context, schedule=lambda updates: sizes.append(len(updates)) or schedule(updates)
    )
    rates = plan.plan_of_run()["learning_rate"]
    assert len(whole) == 3_200_000 and 0 < max(sizes) <= 2**20
    assert 1_100_000 < whole.argmax() < 60_000 * 32
    assert (rates["first"], rates["largest"], rates["last"]) == (whole[0], whole.max(), whole[-1])


# --- the picture


def test_the_picture_has_the_rates_of_the_run():
    cosine = {"initial_learning_rate": 0.02, "epochs_to_total_decay": 4}
    config = RunConfig(
        micro_batch_size=10,
        num_epochs=6,
        lr_schedule="cosine",
        lr_schedule_params=cosine,
        lr_warmup_params={"warmup_mode": "shift", "warmup_epochs": 1.5},
        lr_staircase=True,
    )
    program, updates = make_program(config, 70, seed=0), np.arange(42)
    expected = make_schedule(
        "cosine",
        cosine,
        global_batch_size=10,
        weight_updates_per_epoch=7,
        num_epochs=6,
        warmup=config.lr_warmup_params,
        staircase=True,
    )
    line = draw_schedule(learning_rates(config, program), program, "title").axes[0].get_lines()[0]
    np.testing.assert_array_equal(line.get_xdata(), updates)
    np.testing.assert_array_equal(line.get_ydata(), expected(updates))


def test_curve_of_a_long_run_covers_all_weight_updates():
    updates, rates = schedule_curve(lambda at: np.asarray(at) * 2.0, 1_000_000)
    assert len(updates) <= 20_000 and (updates[0], updates[-1]) == (0, 999_999)
    np.testing.assert_array_equal(rates, updates * 2.0)


def test_planned_splits_are_those_of_the_run(run, lightly):
    options = (
        "--ipus-per-replica 2 --pipeline-splits auto --limit-train 64 --num-epochs 1 --micro-batch-size 4"
    )
    pipeline = [*options.split(), "--run-dir", "run"]
    code, out, err = run(*TRAIN, "--dry-run", *pipeline)
    assert code == 0, err
    code, _, err_of_run = run(*TRAIN, *pipeline)
    assert code == 0, err_of_run
    program = json.loads(Path("run/program.json").read_text())
    (split,) = program["pipeline_splits"]
    assert f"opened by {split} ({program['splits_from']})" in " ".join(out.split())


@pytest.mark.slow
def test_samples_are_drawn_as_training_sees_them(run):
    """The samples are those of the first batches that a session receives, in their order."""
    from ipucnn.runs.setup import training_samples

    options = {
        "dataset": "membranes",
        "limit_train": "6",
        "image_size": "252",
        "augment": "true",
        "seed": "3",
    }
    context = TrainingRun(
        resolve(command="train", model="unet", flags={**options, "dry_run": "true"})
    ).context
    samples = training_samples(context, context.program, 7)
    assert len({sample.name for sample in samples[: context.program.samples_per_epoch]}) == 4
    assert all(re.fullmatch("membranes/train/[0-5]", sample.name) for sample in samples)
    batches = TrainingRun(context.resolved).dataset(0, 7)
    images, labels = next(iter(batches))
    network_range = context.input_range
    for sample, image, label in zip(samples, images.numpy(), labels.numpy()):
        np.testing.assert_array_equal(sample.label, label)
        inside = (sample.image > 0) & (sample.image < 255)  # others were cut off for the picture
        expected = network_range.apply(np.float32(sample.image[np.newaxis]))[0]
        half = 0.51 * np.ptp(network_range.apply(np.float32([[[[1]]], [[[0]]]])))
        assert np.abs(expected - image)[inside].max() <= half
    words = " ".join(
        f"--{name.replace('_', '-')} {value}" for name, value in options.items() if name != "augment"
    )
    code, _, err = run("train", "unet", *words.split(), "--augment", "--dry-run", "--draw-samples", "s.png")
    assert code == 0 and "picture of 12 training samples: s.png" in err
    assert [path.name for path in Path().iterdir()] == ["s.png"]
    code, _, err = run(
        *TRAIN, "--dry-run", "--draw-samples", "d.png", "--limit-train", "64", "--mixup", "0.4"
    )
    assert code == 0, err


def test_arrays_take_the_presets_of_files(tmp_path, succeeds):
    """Without their image size: those of files may differ in size."""
    code = """
        import numpy as np
        images, labels = np.arange(32 * 40 * 40, dtype=np.uint32).reshape(32, 40, 40), np.arange(32) % 2
        images = (images % 251).astype(np.uint8)
        def classes(): return (images, labels), (images[:8] ^ 1, labels[:8])
        def masks(): return (images, images // 128), (images[:2] ^ 1, images[:2] // 128)
    """
    (tmp_path / "data.py").write_text(textwrap.dedent(code))
    for model, name, preset, size in (
        ("efficientnet-b0", "classes", "efficientnet-b0@folder", "40x40x3"),
        ("unet", "masks", "unet@imagemasks", "220x220x1"),
    ):
        _, err = succeeds("train", model, "--dataset", f"data.py:{name}", "--dry-run")
        assert f"{model} (preset {preset}), input {size}," in " ".join(err.split())


def test_training_images_of_one_class_are_refused_only_where_all_are_trained_on(
    tmp_path, lightly, succeeds, run
):
    """A fold may lack a class that the set has, and a validation needs no class to learn."""
    code = """
        import numpy as np
        images = np.arange(8 * 64, dtype=np.uint8).reshape(8, 8, 8)
        few = np.arange(8) == 7
        def two(): return (images, few * 1), (images, few * 1)
        def one(): return (images, few * 0), (images, few * 1)
    """
    (tmp_path / "data.py").write_text(textwrap.dedent(code))
    words = ["toy_model", "--micro-batch-size", 2, "--num-epochs", 1, "--seed", 1, "--dataset"]
    warned = [
        "all training labels are 0: there is nothing to learn"
        in succeeds("train", *words, "data.py:two", "--kfold", 4, "--fold", fold, "--dry-run")[1]
        for fold in (1, 2, 3, 4)
    ]
    assert sum(warned) == 1
    code, _, err = run("train", *words, "data.py:one", "--dry-run")
    assert code == 3 and "all training labels of data-one are 0: there is nothing to learn" in err
    succeeds("train", *words, "data.py:two", "--run-dir", "r")
    succeeds("train", *words, "data.py:one", "--no-training", "--weights", "r", "--dry-run")
