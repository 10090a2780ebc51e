"""Files of Graphcore's public TensorFlow 2 CNN application: options, entries, and the effect of defaults on pixels.

tests/data/public_style.yml has entries written for these tests in the layout of that application's configs.yml.
"""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.refusals import Refusal, check_raises, check_refused
from tensorflow import keras

from ipucnn.config.options import RunConfig, find_spec
from ipucnn.config.presets import PresetFile, read_file
from ipucnn.config.resolve import resolve
from ipucnn.config.spec import OptionSpec
from ipucnn.datasets.base import ArrayExamples, data_source
from ipucnn.datasets.pipeline import Stream, eval_batches, train_batches
from ipucnn.datasets.pixels import InputRange
from ipucnn.errors import ConfigurationError
from ipucnn.planning.pipeline_plan import PipelinePlan
from ipucnn.runs import setup as run_setup
from ipucnn.sessions.host.session import HostSession
from ipucnn.sessions.session import DeviceInfo
from ipucnn.training.program import make_program

FILE = Path(__file__).parent / "data" / "public_style.yml"
HOLDERS = ("photographs", "gc_photographs", "thumbnails")
ENTRIES = [name for name in read_file(FILE).names if name not in HOLDERS]
# Their layers are not among the shipped graphs; they are read from the built network.
BUILT = ("piped_groups", "piped_small_network")

# Every option that the application's description lists, and a value for it.
DESCRIBED = {
    "on-demand": "True",
    "seed": "5",
    "checkpoints": "False",
    "checkpoint-dir": "somewhere",
    "clean-dir": "False",
    "dataset": "cifar10",
    "dataset-path": ".",
    "model-name": "cifar_resnet8",
    "eight-bit-transfer": "True",
    "pipeline-num-parallel": "24",
    "training": "True",
    "micro-batch-size": "2",
    "num-epochs": "3",
    "logs-per-epoch": "1/3",
    "weight-updates-per-epoch": "7",
    "num-replicas": "2",
    "gradient-accumulation-count": "8",
    "global-batch-size": "none",
    "precision": "16.32",
    "pipeline-splits": "conv3_block1_layer1_conv_ds",
    "device-mapping": "0 1",
    "pipeline-schedule": "Interleaved",
    "optimizer": "lars",
    "optimizer-params": '{"momentum": 0.5}',
    "loss-scaling": "16",
    "weight-decay": "0",
    "l2-regularization": "0.001",
    "recomputation": "True",
    "accelerator-side-preprocess": "True",
    "stochastic-rounding": "RI",
    "optimizer-state-offloading": "False",
    "fp-exceptions": "True",
    "lr-schedule": "cosine",
    "lr-warmup-params": '{"warmup_mode": "mask", "warmup_epochs": 1}',
    "lr-schedule-params": '{"initial_learning_rate": 0.01, "epochs_to_total_decay": 2}',
    "lr-staircase": "True",
    "dbn-replica-group-size": "1",
    "bn-momentum": "0.9",
    "label-smoothing": "0.1",
    "half-partials": "True",
    "internal-exchange-optimization-target": "balanced",
    "max-cross-replica-buffer-size": "1024",
    "max-reduce-many-buffer-size": "2048",
    "gather-conv-output": "True",
    "stable-norm": "True",
    "available-memory-proportion": "20 10 30 15",
    "wandb": "True",
    "validation": "False",
    "validation-micro-batch-size": "4",
    "validation-num-replicas": "2",
}
# Further options in its source (configuration/terminal_argparse.py)
FURTHER = """
compile-only shuffle deterministic ckpts-per-epoch first-ckpt-epoch checkpoint-input-dir
checkpoint-output-dir ckpt-all-instances synthetic-data accelerator-side-reduction nanoo norm-layer
fused-preprocessing conv-dithering min-remote-tensor-size scheduling-algorithm prefetch-depth mlperf-logging
wandb-run-name wandb-tags pipeline-validation-model sweep target-accuracy auto-loss-scaling
"""


@pytest.mark.parametrize("underscores", [False, True])
def test_every_described_option_is_a_flag_and_a_key_in_both_spellings(report, tmp_path, underscores):
    spell = (lambda key: key.replace("-", "_")) if underscores else (lambda key: key)
    flags = [word for key, value in DESCRIBED.items() for word in (f"--{spell(key)}", *_words(value))]
    shown = report("train", *flags, "--print-config")["options"]
    typed = {key: entry["value"] for key, entry in shown.items()}
    file = tmp_path / "mine.yml"
    text = "".join(f"  {spell(key)}: {value}\n" for key, value in DESCRIBED.items())
    file.write_text("entry:\n" + text, encoding="utf-8")
    chosen = (f"--{spell('config-path')}", file, "--config", "entry", "--augment", "False")
    shown = report("train", *chosen, "--print-config")["options"]
    written = {key: entry["value"] for key, entry in shown.items()}
    assert {key: written[key] for key in DESCRIBED} == {key: typed[key] for key in DESCRIBED}
    differing = [key for key in DESCRIBED if typed[key] == find_spec(key).yaml_value(find_spec(key).default)]
    # Typed with their default values, because other values would contradict the others.
    assert set(differing) <= {
        *("on-demand", "clean-dir", "dataset-path", "training", "global-batch-size", "weight-decay"),
        *("dbn-replica-group-size",),
    }


def _words(value):
    return [value] if value.startswith("{") else value.split()


@pytest.mark.parametrize("key", [*DESCRIBED, *FURTHER.split()])
def test_file_may_contain_every_option_of_the_application(key):
    spec = find_spec(key)
    assert isinstance(spec, OptionSpec) and find_spec(key.replace("-", "_")) is spec
    if key == "compile-only":
        assert not spec.in_yaml  # a file's values apply to every run
        return
    value = "mask" if spec.optional else json.dumps(spec.yaml_value(spec.default))
    value = DESCRIBED.get(key, "none" if spec.optional else value)
    for spelling in (key, key.replace("-", "_")):
        assert spec.name in PresetFile(f"entry:\n  {spelling}: {value}\n", "mine.yml").get("entry").values


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_prints_its_config_without_data(succeeds, name):
    out, err = succeeds("train", "--config", name, "--config-path", FILE, "--print-config", "--json")
    assert err == ""
    shown = json.loads(out)
    assert shown["preset"] == name
    in_file = read_file(FILE).get(name).values
    for field, value in in_file.items():
        if (name, field) == ("first_steps", "shuffle"):
            value = False  # shuffling is off in deterministic runs
        key = field.replace("_", "-")
        assert shown["options"][key]["value"] == find_spec(key).yaml_value(value), key


@pytest.mark.slow_cases("one_ipu", "one_ipu_more", "piped_16k_mixed", "piped_8k", "with_norms")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in BUILT else []) for n in ENTRIES]
)
def test_every_entry_plans_on_its_system(report, name):
    plan = PipelinePlan.from_dict(report("plan-splits", "--config", name, "--config-path", FILE))
    config = resolve("plan-splits", {}, config_name=name, config_path=str(FILE)).config
    assert plan.verdict == "fits"
    if config.pipeline_splits:
        assert plan.num_stages == len(config.pipeline_splits) + 1
        assert plan.settings.num_replicas == config.num_replicas
        assert (
            plan.settings.occupied_ipus
            == (max(config.device_mapping or range(plan.num_stages)) + 1) * config.num_replicas
        )
    if name == "mk2_resnet50_8k_bn_pipeline":
        s = plan.settings
        assert (s.num_stages, s.num_replicas, s.occupied_ipus) == (4, 4, 16)
        assert (s.micro_batch_size, s.gradient_accumulation_count, s.global_batch_size) == (16, 128, 8192)
        assert (s.precision, s.half_partials) == ("16.16", True)
        assert (s.schedule, plan.system.name) == ("Grouped", "pod16")


def test_migration_page_has_a_row_for_every_option():
    page = (Path(__file__).parents[1] / "docs" / "migrate.md").read_text(encoding="utf-8")
    rows = page.split("### Flag by flag")[1].split("###")[0].splitlines()
    named = re.findall(
        r"`--([a-z0-9-]+)`", " ".join(row.split("|")[1] for row in rows if row.startswith("|"))
    )
    assert sorted(named) == sorted({*DESCRIBED, *FURTHER.split(), "config", "config-path", "wandb-params"})
    # Options that no longer exist have another name in its description.
    older = {"checkpoints", "checkpoint-dir", "bn-momentum", "wandb-params"}
    assert len(set(named) - older) == 73


# The programs of vision/cnns/tensorflow2 of graphcore/examples, without its tests and modules
SCRIPTS = (
    *("train.py", "run_and_time.py", "run_sweep.py", "run_mlperf_sweep.py", "send_request.py", "sweeps/"),
    *("scripts/verify_dataset.py", "scripts/dataset_benchmark.py", "scripts/export_for_serving.py"),
    *("scripts/get_tests_data.py", "scripts/run_experiment.sh", "scripts/compare_with_without_poprun.sh"),
    *("datasets/build_imagenet_data.py", "benchmarks.yml"),
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_migration_page_has_a_row_for_every_script(script):
    page = (Path(__file__).parents[1] / "docs" / "migrate.md").read_text(encoding="utf-8")
    table = page.split("## The CNN application")[1].split("###")[0].splitlines()
    rows = [row.split("|") for row in table if row.startswith("|")]
    assert any(script in its and equivalent.strip() for _, its, equivalent, *_ in rows)


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("synthetic_data", "cpu", "host"),
        ("kfold", "1", None),
        *(("dataset", spelling, "imagenet") for spelling in ("gc-imagenet", "GC_ImageNet", "imagenet")),
    ],
)
def test_values_of_its_readmes_have_the_same_meaning(flag, value, expected):
    assert getattr(resolve("plan-splits", {flag: value}, model="resnet50").config, flag) == expected


@pytest.mark.parametrize(
    ("precision", "flags", "conflicts"),
    [
        ("", "--optimizer lars", ("32 bits", "--optimizer lars")),
        ("--precision 16.16", "--weight-decay 0.1", ("momentum 0.9", "--weight-decay 0.1")),
    ],
)
def test_all_loss_scale_conflicts_are_reported_together_and_the_hint_works(
    run, report, precision, flags, conflicts
):
    """Following the hint is enough, whatever the preset has."""
    words = f"train cifar_resnet8 --dataset digits --auto-loss-scaling --dry-run {precision}".split()
    code, _, err = run(*words, *flags.split(), columns=2000)
    error, advice = err.splitlines()
    assert code == 2
    for conflict in (*conflicts, "--lr-schedule cosine", "--lr-warmup-params"):
        assert conflict in error, conflict
    (hint,) = re.findall(r"\buse (--.*?)(?:, or |$)", advice)
    assert report(*words, *shlex.split(hint))["program"]["auto_loss_scaling"]


EXAMPLES = """
--model cifar_resnet8 --wandb --num-epochs 11 --precision 16.16 --micro-batch-size 32 --dataset-path /data/
--model-name cifar_resnet8 --pipeline-splits conv2_block1_post_addition_relu conv3_block1_post_addition_relu conv4_block1_post_addition_relu --device-mapping 0 1 2 3 --gradient-accumulation-count 8 --recomputation True
{base} --num-epochs 6 --logs-per-epoch 1
{base} --num-epochs 6 --logs-per-epoch 2
{base} --num-epochs 6 --logs-per-epoch 10
{base} --num-epochs 6 --logs-per-epoch 0.5
{base} --num-epochs 6 --logs-per-epoch 0.3333333333333333333
{base} --num-epochs 5 --logs-per-epoch 0.5
{base} --num-epochs 6 --logs-per-epoch 0
--accelerator-side-preprocess True --eight-bit-transfer True
--accelerator-side-preprocess False --dataset gc-imagenet --dataset-path /data/imagenet-data --gradient-accumulation-count 8 --micro-batch-size 8
""".strip().format(  # noqa: E501
    base="--model cifar_resnet8 --precision 16.16 --micro-batch-size 8 --validation False --half-partials True "
    "--gradient-accumulation 8"
)


@pytest.mark.parametrize("line", EXAMPLES.splitlines())
def test_described_command_lines_are_accepted(report, line):
    options = report("train", *line.split(), "--print-config")["options"]
    shown = {key: entry["value"] for key, entry in options.items()}
    words = line.split()
    for option, value in zip(words, [*words[1:], "--"]):
        if option.startswith("--"):
            spec = find_spec(option[2:])
            expected = spec.convert("True" if value.startswith("--") else value)
            if spec.kind.is_list:
                expected = [expected[0], *shown[spec.key][1:]]
            assert shown[spec.key] == spec.yaml_value(expected), option


def test_eight_bit_transfer_defaults_to_preprocessing_on_the_device():
    resolved = resolve("train", {"eight_bit_transfer": True}, model="toy_model")
    assert resolved.config.accelerator_side_preprocess
    assert str(resolved.origins["accelerator_side_preprocess"]) == "eight-bit-transfer"


# --- augmentation of files that do not mention it


def _config(tmp_path, text, dataset, **flags):
    file = tmp_path / "mine.yml"
    file.write_text(f"entry:\n  model: cifar_resnet8\n  dataset: {dataset}\n{text}", encoding="utf-8")
    return resolve("train", flags, config_name="entry", config_path=str(file), needs_data=False)


def _public_notes(resolved):
    return [note for note in resolved.notes(on_ipus=False) if "public defaults" in note]


@pytest.mark.parametrize(
    "dataset, augment, normalise",
    [
        ("cifar10", True, "image"),
        ("cifar100", True, "image"),
        ("gc-imagenet", True, "network"),
        ("digits", False, "network"),
    ],
)
def test_file_without_the_key_augments_like_the_application(tmp_path, dataset, augment, normalise):
    resolved = _config(tmp_path, "", dataset)
    assert (resolved.config.augment, resolved.config.normalise) == (augment, normalise)
    (note,) = _public_notes(resolved)
    assert ("augment True" in note) == augment == (str(resolved.origins["augment"]) == "public default")
    assert ("normalise image" in note) == (normalise == "image")
    # Values of the file or of a flag override it.
    for text, flags in (("  augment: False\n", {}), ("", {"augment": False})):
        resolved = _config(tmp_path, text, dataset, **flags)
        assert not resolved.config.augment and "augment" not in _public_notes(resolved)[0]
    assert _config(tmp_path, "  augment: True\n", dataset).config.normalise == "network"


@pytest.mark.parametrize(
    "written, known",
    [
        ("CIFAR-10", "cifar10"),
        ("cifar_100", "cifar100"),
        ("ImageNet", "imagenet"),
        ("tfds:cifar10:3.0.2", None),
    ],
)
@pytest.mark.parametrize("synthetic", [None, "host"])
def test_application_augmentation_needs_no_data_and_accepts_any_spelling(tmp_path, written, known, synthetic):
    flags = {} if synthetic is None else {"synthetic_data": synthetic}
    resolved = _config(tmp_path, "", written, **flags)
    assert resolved.config.dataset == (known or written)
    assert resolved.config.augment and resolved.config.normalise == (
        "network" if known == "imagenet" else "image"
    )


def test_options_missing_in_a_file_have_the_application_defaults(tmp_path):
    """Its defaults are those of ``add_arguments`` in its terminal_argparse.py."""
    names = ("precision", "stochastic_rounding", "norm_layer", "prefetch_depth")
    public = ["16.16", "ON", {"name": "custom_batch_norm", "momentum": 0.97}, 1]
    resolved = _config(tmp_path, "", "digits")
    assert [getattr(resolved.config, name) for name in names] == public
    assert {str(resolved.origins[name]) for name in names} == {"public default"}
    assert all(f"{name.replace('_', '-')} " in _public_notes(resolved)[0] for name in names)
    named = _config(
        tmp_path, "  precision: 32.32\n  norm-layer: {name: group_norm, num_groups: 4}\n", "digits"
    )
    assert (named.config.precision, named.config.norm_layer["name"]) == ("32.32", "group_norm")
    assert _config(tmp_path, "", "digits", stochastic_rounding="OFF").config.stochastic_rounding == "OFF"
    # The network has no normalisation to change; recipes and presets of this project keep their defaults.
    file = tmp_path / "mine.yml"
    file.write_text("entry:\n  model: lenet\n", encoding="utf-8")
    resolved = resolve("train", {}, config_name="entry", config_path=str(file), needs_data=False)
    assert str(resolved.origins["norm_layer"]) == "network" and resolved.config.precision == "16.16"
    for name, precision in (
        ("public_cifar_resnet8", "16.16"),
        ("keras_mnist", "32.32"),
        ("ulhpc_resnet50", None),
    ):
        resolved = resolve("train", {}, config_name=name, needs_data=False)
        assert (str(resolved.origins["stochastic_rounding"]) == "public default") == name.startswith("public")
        assert precision in (None, resolved.config.precision)


def test_saved_configuration_is_unchanged_when_loaded(tmp_path):
    config = resolve("train", {"dataset": "cifar10"}, model="cifar_resnet8", needs_data=False).config
    file = tmp_path / "config.yml"
    file.write_text(config.to_yaml(), encoding="utf-8")
    resolved = resolve("train", {}, config_path=str(file), needs_data=False)
    assert resolved.config == config and not _public_notes(resolved)


def _cifar(rng, count=3):
    images = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    images[0] = 0
    images[1] = 200
    examples = ArrayExamples(images, np.arange(count, dtype=np.int32))
    return data_source(
        examples,
        examples,
        name="cifar10",
        class_names=[str(n) for n in range(count)],
        location="here",
        augmentation="crop_flip",
    )


def _standardised(image):
    """Standardises one image like the application, in Python's own 64-bit arithmetic."""
    values = image.astype(np.float64)
    deviation = values.std()
    return (values - values.mean()) / (deviation if deviation else 1.0)


def _crops(image):
    """Returns every crop of an image padded by 4 black pixels, and its mirror image."""
    padded = np.zeros((40, 40, 3), image.dtype)
    padded[4:36, 4:36] = image
    for top in range(9):
        for left in range(9):
            crop = padded[top : top + 32, left : left + 32]
            yield crop
            yield crop[:, ::-1]


def test_cifar_is_padded_black_cropped_mirrored_and_then_standardised():
    source = _cifar(np.random.default_rng(0))
    options = {"input_shape": (32, 32, 3), "batch_size": 3}
    options["input_range"] = InputRange.of("image", source.info, 3)
    batches = train_batches(source, Stream(samples_per_epoch=3, augment=True, seed=3, **options))
    ways = [np.stack([_standardised(crop) for crop in _crops(image)]) for image in source.train.images[:3]]
    places = set()
    for images, labels in batches.take(12):
        for image, label in zip(images.numpy(), labels.numpy()):
            errors = np.abs(ways[label] - image).max(axis=(1, 2, 3))
            assert errors.min() < 1e-6
            if label == 2:  # many crops of a constant image are alike
                places.add(int(errors.argmin()))
    assert len(places) > 8 and {place % 2 for place in places} == {0, 1}
    # Without augmentation images are unchanged, and constant images are zeros.
    (images, labels, _) = next(iter(eval_batches(source.eval, source.info, **options)))
    for image, label in zip(images.numpy(), labels.numpy()):
        assert np.abs(image - _standardised(source.eval.images[label])).max() < 1e-6
    assert not images.numpy()[:2].any()


# --- preprocessing on host or device


@pytest.mark.parametrize("input_range", ["image", "caffe"])
@pytest.mark.parametrize("transfer", ["accelerator_side_preprocess", "eight_bit_transfer"])
def test_pixels_are_equal_whether_host_or_device_prepares_them(input_range, transfer):
    source = _cifar(np.random.default_rng(1))
    inputs = keras.Input((32, 32, 3))
    network = keras.Model(inputs, keras.layers.Flatten()(inputs))

    def batches(range_):
        chosen = InputRange.of(range_, source.info, 3)
        outputs = eval_batches(
            source.eval, source.info, batch_size=3, input_shape=(32, 32, 3), input_range=chosen
        )
        return outputs.map(lambda images, labels, weights: images)

    outputs = []
    for config, range_ in ((RunConfig(), input_range), (RunConfig(**{transfer: True}), "raw")):
        session = HostSession(DeviceInfo("cpu", "CPU", 1, 0), config)
        session = session.with_pixels(InputRange.of(input_range, source.info, 3))
        assert session.takes_pixels == (range_ == "raw")
        outputs.append(np.concatenate(session.predictor(network).predict(batches(range_))))
        element = session.transfer.pack(next(iter(batches(range_))))
        is_byte = session.takes_pixels and transfer == "eight_bit_transfer"
        assert element.dtype == ("uint8" if is_byte else "float32")
        assert element.numpy().nbytes == 3 * 32 * 32 * 3 * (1 if is_byte else 4)
    scale = max(1.0, float(np.abs(outputs[0]).max()) / 3)  # ImageNet's "caffe" range goes to 150
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=0, atol=1e-6 * scale)


# --- synthetic data


@pytest.mark.slow
@pytest.mark.slow_cases("ipu")
@pytest.mark.parametrize("where", ["host", "ipu"])
def test_noise_replaces_an_absent_data_set(succeeds, where):
    flags = ("--dataset", "cifar100", "--dataset-path", "nowhere", "--synthetic-data", where, "--seed", 1)
    batch = ("--micro-batch-size", 8, "--global-batch-size", 1032, "--weight-updates-per-epoch", 1)
    rest = ("--num-epochs", 2, "--no-validation", "--run-dir", "run", "--json")
    out, err = succeeds("train", "toy_model", *flags, *batch, *rest)
    assert "synthetic data, in place of cifar100" in err
    report = json.loads(out)
    assert report["dataset"]["name"] == "random"
    config = yaml.safe_load(Path("run/config.yml").read_text(encoding="utf-8"))
    assert (config["dataset"], config["synthetic-data"]) == ("cifar100", where)


@pytest.mark.parametrize("written", ["cifar100", "CIFAR-100", "cifar_100", "tfds:cifar100"])
def test_noise_has_the_size_of_the_replaced_set(here, written):
    setup = run_setup.prepare(
        resolve("train", {"dataset": written, "synthetic_data": "host"}, model="lenet"), 1
    )
    assert (setup.input_shape, setup.source.info.num_classes) == ((32, 32, 1), 100)


@pytest.mark.parametrize("written", ["nosuchset", "cifar1000"])
def test_noise_for_an_unknown_set_is_refused(here, written):
    flags, words = {"dataset": written, "synthetic_data": "host"}, f"data set '{written}' is unknown"
    error = check_raises(ConfigurationError, words, "", resolve, "train", flags, model="lenet")
    assert ("did you mean 'cifar100'" in error.hint) == (written == "cifar1000")
    Path("mine").mkdir()
    for fine in ("tfds:svhn_cropped", "mine", "elsewhere/images"):
        resolve("train", {"dataset": fine, "synthetic_data": "host"}, model="lenet")


@pytest.mark.parametrize("written", ["CIFAR-10", "tfds:cifar10"])
def test_planning_accepts_any_spelling_of_a_set(succeeds, written):
    out, err = succeeds("plan-splits", "toy_model", "--dataset", written, "--stages", 2)
    assert "input 32x32x3" in " ".join((out + err).split())


def test_noise_beyond_memory_is_refused_before_it_is_made(run):
    command = (
        "train lenet --synthetic-data host --global-batch-size 2000000000 --micro-batch-size 8 --run-dir run"
    )
    error = "noise of 2000000256 images of 28x28x1 needs"
    check_refused(run, Refusal(command, error, "use smaller batches", 4))


@pytest.mark.slow
def test_one_batch_stays_on_the_device(here):
    for where, is_constant in (("host", False), ("ipu", True)):
        resolved = resolve("train", {"synthetic_data": where, "seed": 1}, model="toy_model")
        setup = run_setup.prepare(resolved, 1)
        assert len(setup.source.train) == 1024 and setup.source.info.num_classes == 10
        program = make_program(resolved.config, 1024, seed=1)
        batches = [
            images.numpy()
            for start in (0, 5)
            for images, _ in run_setup.training_batches(setup, program, start, 32, shard=(1, 0)).take(2)
        ]
        assert all((image == batches[0]).all() for image in batches) == is_constant


@pytest.mark.parametrize(
    ("more", "expected"), [("", (4, "public default")), ("  validation_freq: 2\n", (2, "preset p"))]
)
def test_only_saved_checkpoints_are_validated(here, more, expected):
    Path("c.yml").write_text(
        f"p:\n  model_name: resnet50\n  dataset: imagenet\n  ckpts_per_epoch: 1/4\n{more}"
    )
    resolved = resolve("train", {"host_generated_data": "true"}, config_name="p", config_path="c.yml")
    assert (resolved.config.validation_freq, str(resolved.origins["validation_freq"])) == expected
