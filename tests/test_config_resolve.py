"""Resolving: defaults < preset < flags, options that replace each other, and the round trip of config.yml."""

import sys
import types
from pathlib import Path

import pytest
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st
from support.presets import few_presets as few_presets
from support.refusals import check_raises

from ipucnn.config.bounds import LEAST_FRACTION, MAX_FLOAT32
from ipucnn.config.options import SPECS, RunConfig
from ipucnn.config.resolve import place_of_data, resolve, resolve_resumed, resolve_saved
from ipucnn.config.spec import DIRECTORY, FRACTION, SAVED_FILE
from ipucnn.datasets.registry import ChosenDataset
from ipucnn.errors import ConfigurationError, DataError


@pytest.fixture(autouse=True)
def datasets_here(monkeypatch, few_presets):
    """Replaces the data set registry by one that finds any data set, or else the embedded digits; uses few presets."""
    module = types.ModuleType("ipucnn.datasets.registry")

    def choose_dataset(name, path, *, home, task, **_):
        assert isinstance(path, Path)
        return ChosenDataset(name or "digits", None, "data: digits", "classification")

    module.choose_dataset = choose_dataset
    module.canonical = module.known_as = lambda name: name
    module.is_folder_name = lambda name: name.startswith(".")
    monkeypatch.setitem(sys.modules, "ipucnn.datasets.registry", module)
    monkeypatch.setattr("ipucnn.datasets.registry", module, raising=False)


@pytest.fixture
def preset_file(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text(
        "mine:\n"
        "  model: resnet50\n"
        "  global-batch-size: 64\n"
        "  optimizer: rmsprop\n"
        "  optimizer-params: {rho: 0.9}\n"
        "  lr-schedule: cosine\n"
        "  lr-schedule-params: {initial_learning_rate: 0.001, epochs_to_total_decay: 5}\n"
        "  pipeline-splits: [conv2_block2_out, conv3_block1_out]\n"
        "  device-mapping: [0, 1, 0]\n"
        "  stable-norm: true\n"
        "  steps-per-execution: 4\n"
    )
    return str(path)


def of_preset(preset_file, flags):
    return resolve("train", flags, config_name="mine", config_path=preset_file)


def test_every_value_has_an_origin(preset_file):
    resolved = of_preset(preset_file, {"num_epochs": "3"})
    assert resolved.config.num_epochs == 3
    origins = {"num_epochs": "flag", "global_batch_size": "preset mine", "seed": "default"}
    assert {name: str(resolved.origins[name]) for name in origins} == origins
    assert (resolved.record.name, resolved.preset, resolved.config.dataset) == ("resnet50", "mine", "digits")
    assert resolved.notes(on_ipus=False)[-1].endswith("without effect on the host: stable-norm")
    assert not any("stable-norm" in note for note in resolved.notes(on_ipus=True))


def test_options_outside_of_presets_are_said_to_be_left_out(tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text("num-epochs: 7\nall: &all\n  seed: 2\nmine:\n  <<: *all\n  model-name: lenet\n")
    resolved = resolve("train", {"dataset": "digits"}, config_name="mine", config_path=file)
    assert resolved.config.seed == 2
    assert resolved.config.num_epochs != 7
    assert resolved.notes(on_ipus=False)[0].endswith("mine.yml: outside of a preset, so not read: num-epochs")
    file.write_text(file.read_text().partition("\n")[2])
    assert not resolve("train", {"dataset": "digits"}, config_name="mine", config_path=file).left_out


@pytest.mark.parametrize("place", (".", "..", "./"))
def test_data_of_the_folder_in_which_a_run_was_trained_are_elsewhere(place, tmp_path, monkeypatch):
    """The folder is there wherever the next command is typed, and so says nothing."""
    monkeypatch.chdir(tmp_path)
    saved = resolve("train", {"dataset": place}, model="lenet").config
    with pytest.raises(DataError) as raised, place_of_data(saved, {}, "run"):
        raise DataError("no set", "no hint")
    assert raised.value.hint.startswith(
        f"the run was trained with --dataset {saved.dataset} in another folder; add"
    )
    with pytest.raises(DataError) as raised, place_of_data(saved, {"dataset": "photos"}, "run"):
        raise DataError("no set", "no hint")
    assert raised.value.hint == "no hint"


def test_one_fold_is_noted_as_a_run_without_folds(tmp_path):
    note = "note: no folds: --kfold 1 is one run on the data set's own split"
    for flags, notes in (({"kfold": "1"}, [note]), ({"kfold": "2"}, []), ({}, [])):
        resolved = resolve("train", {"dataset": "digits", **flags}, model="lenet")
        assert [line for line in resolved.notes(on_ipus=False) if "fold" in line] == notes
    of_run = tmp_path / "config.yml"
    of_run.write_text("model-name: lenet\ndataset: digits\nkfold: null\n")
    assert note not in resolve("train", {}, config_path=str(of_run)).notes(on_ipus=False)


def test_text_that_begins_with_0_stays():
    text = "dataset: '007'\ndataset-path: 007\nrun-dir: 00\nseed: 0\nlabel-smoothing: 0.5\n"
    config = RunConfig.from_yaml(text)
    assert (config.dataset, config.dataset_path, config.run_dir) == ("007", Path("007"), Path("00"))
    assert (config.seed, config.label_smoothing) == (0, 0.5)


def test_options_without_effect_in_32_bits_are_noted(tmp_path):
    text = "nanoo: True\nauto-loss-scaling: True\nstochastic-rounding: RI\n"
    for precision in ("32.32", "16.16"):
        path = tmp_path / f"{precision}.yml"
        path.write_text(f"{text}precision: {precision}\n", encoding="utf-8")
        resolved = resolve("train", {}, model="lenet", config_path=str(path))
        expected = [f"{key} (in 32.32)" for key in ("nanoo", "auto-loss-scaling", "stochastic-rounding")]
        note = resolved.notes(on_ipus=False)[-1]
        assert all((key in note) == (precision == "32.32") for key in expected)


@pytest.mark.parametrize(
    ("model", "flags", "preset", "micro_batch_size"),
    [
        ("cifar-resnet8", {}, "cifar_resnet8", 32),
        ("efficientnet-b0", {}, "efficientnet-b0@digits", 8),
        ("efficientnet-b0", {"dataset": "cifar10"}, "efficientnet-b0", 8),
    ],
)
def test_the_preset_is_that_of_the_model_and_data_set(model, flags, preset, micro_batch_size):
    resolved = resolve("train", flags, model=model)
    assert (resolved.preset, resolved.config.micro_batch_size) == (preset, micro_batch_size)
    assert resolved.config.model_name == preset.partition("@")[0]
    assert str(resolved.origins["micro_batch_size"]) == f"preset {preset}"
    assert resolved.notes(on_ipus=False) == [resolved.choice.message]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            {"gradient_accumulation_count": "4"},
            {"gradient_accumulation_count": 4, "global_batch_size": None},
        ),
        (
            {"learning_rate": "0.1"},
            {"learning_rate": 0.1, "lr_schedule_params": {"epochs_to_total_decay": 5}},
        ),
        (
            {"optimizer": "sgd", "lr_schedule": "const"},
            {"optimizer_params": {"momentum": 0}, "lr_schedule_params": {"initial_learning_rate": 0.001}},
        ),
        (
            {"pipeline_splits": ["conv4_block1_out"]},
            {"pipeline_splits": ("conv4_block1_out",), "device_mapping": None},
        ),
        # 0 is a value: the whole run is one execution.
        ({"logs_per_epoch": "0"}, {"logs_per_epoch": 0, "steps_per_execution": None}),
    ],
)
def test_a_flag_replaces_the_options_of_the_preset_that_it_excludes(preset_file, flags, expected):
    config = of_preset(preset_file, flags).config
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    "flags", [{}, {"gradient_accumulation_count": "4"}, {"learning_rate": "0.1"}, {"optimizer": "sgd"}]
)
def test_the_same_command_line_resumes_a_run(tmp_path, preset_file, flags):
    """Values that another option replaced do not count as a difference from the run."""
    with open(preset_file, "a", encoding="utf-8") as file:
        file.write("  deterministic: true\n  shuffle: true\n")

    def command(**more):
        return of_preset(preset_file, {**flags, **more})

    config = command().config
    assert not config.shuffle
    assert resolve_resumed(command(), config, "r").config == config
    assert resolve_resumed(command(num_epochs="9"), config, "r").config.num_epochs == 9
    other, words = command(micro_batch_size="3"), "--micro-batch-size 3: the run in r has"
    check_raises(ConfigurationError, words, "", resolve_resumed, other, config, "r")


def test_options_that_change_a_continued_run_were_typed(preset_file):
    config = of_preset(preset_file, {}).config
    more = {"num_epochs": "9", "run_dir": "r", "max_workers": "4", "checkpoint_input_dir": "c"}
    continued = resolve_resumed(of_preset(preset_file, more), config, "r")
    typed = {name for name in continued.origins if continued.origins[name].is_typed}
    assert typed == {"num_epochs", "run_dir", "checkpoint_input_dir"}
    assert str(continued.origins["optimizer"]) == "run"
    assert continued.config.max_workers == 1 and continued.config.checkpoint_input_dir == Path("c")


def test_a_named_preset_is_the_users_and_the_networks_own_is_not(preset_file, tmp_path):
    named = of_preset(preset_file, {"num_epochs": "9"}).origins
    own = resolve("train", {}, model="lenet").origins
    flat = tmp_path / "flat.yml"
    flat.write_text("optimizer: adam\n", encoding="utf-8")
    of_file = resolve("train", {}, model="lenet", config_path=str(flat)).origins
    answers = [
        (origin.is_given, origin.by_user, origin.is_typed, origin.named_with)
        for origin in (named["seed"], named["num_epochs"], named["global_batch_size"], of_file["optimizer"])
    ]
    assert answers == [
        (False, False, False, ""),
        (True, True, True, ""),
        (True, True, False, "--config and --config-path"),
        (True, True, False, "--config-path"),
    ]
    of_preset_alone = next(origin for origin in own.values() if str(origin) == "preset lenet")
    assert of_preset_alone.is_given and not of_preset_alone.by_user


def test_a_rate_that_another_schedule_keeps_has_the_origin_of_the_rate(preset_file):
    resolved = of_preset(preset_file, {"lr_schedule": "polynomial"})
    assert resolved.config.lr_schedule_params == {"initial_learning_rate": 0.001}
    assert str(resolved.origins["lr_schedule_params"]) == "preset mine"
    assert str(resolve("train", {"lr_schedule": "cosine"}).origins["lr_schedule_params"]) == "default"


@pytest.mark.parametrize(
    "command, size", [("evaluate", 4), ("train", 4), ("infer", None), ("benchmark", None)]
)
def test_options_of_validations_are_only_for_commands_that_have_them(tmp_path, command, size):
    file = tmp_path / "mine.yml"
    file.write_text(
        "model-name: lenet\nmicro-batch-size: 8\nvalidation-micro-batch-size: 4\n", encoding="utf-8"
    )
    resolved = resolve(command, {}, model="lenet", config_path=str(file), reads_data=False)
    assert resolved.config.validation_micro_batch_size == size
    assert resolved.origins["validation_micro_batch_size"].is_given == (size is not None)
    assert resolved.config.micro_batch_size == 8


def test_one_model_may_be_given_twice():
    assert resolve("train", {"model_name": "cifar-resnet8"}, model="cifar_resnet8").record.name


def test_a_network_without_batch_norm_keeps_its_norm():
    registry = pytest.importorskip("ipucnn.models.registry")
    record = next(record for record in registry.list_models() if record.default_norm == "none")
    assert resolve("train", {}, model=record.name).config.norm_layer == {"name": "none"}
    typed = resolve("train", {"norm_layer": "batch_norm"}, model=record.name)
    assert typed.config.norm_layer == {"name": "batch_norm"}


def test_flags_override_a_saved_run():
    saved = resolve("train", {"seed": "7"}, model="lenet").config
    resolved = resolve_saved("evaluate", RunConfig.from_yaml(saved.to_yaml()), {"limit_eval": "10%"})
    assert resolved.config.seed == 7
    assert resolved.config.limit_eval == "10%"
    assert str(resolved.origins["limit_eval"]) == "flag"
    assert str(resolved.origins["seed"]) == "run"
    assert resolved.record.name == "lenet"


def _is_word(text):
    """Returns whether text is one word with no special meaning (not none, no list)."""
    return text.split() == [text] and not set(",[]") & set(text) and text.lower() not in ("none", "null")


_WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=0x24F), min_size=1, max_size=12).filter(
    _is_word
)
_NUMBERS = st.one_of(st.integers(-(10**9), 10**9), st.floats(-MAX_FLOAT32, MAX_FLOAT32))
_NAMES = st.text("abcdefgh_", min_size=1, max_size=8)
_SCALARS = st.one_of(_NUMBERS, st.booleans(), st.sampled_from(["shift", "mask"]))
_DICTS = st.dictionaries(_NAMES, st.one_of(_SCALARS, st.lists(_NUMBERS, max_size=3)))


def _values(spec):
    """Returns a strategy for legal values of an option."""
    special = {
        "image_size": st.tuples(st.integers(1, 5000), st.integers(1, 5000)),
        "limit_train": st.sampled_from(["1", "500", "10%", "0.5%"]),
        "limit_eval": st.sampled_from(["1", "500", "10%", "0.5%"]),
        "precision": st.sampled_from(["16.16", "16.32", "32.32"]),
        "stochastic_rounding": st.sampled_from(["ON", "OFF", "RI"]),
        "weight_updates_per_epoch": st.sampled_from([-1, 1, 391]),
        "available_memory_proportion": st.lists(st.floats(1, 100), max_size=4).map(tuple),
        "device_mapping": st.lists(st.integers(0, 15), max_size=4).map(tuple),
        "pipeline_splits": st.lists(_WORDS, max_size=4).map(tuple),
        "wandb_tags": st.lists(_WORDS, max_size=4).map(tuple),
        "convolution_options": st.dictionaries(_NAMES, _SCALARS),
        "matmul_options": st.dictionaries(_NAMES, _SCALARS),
        "norm_layer": st.sampled_from(
            [
                {"name": "none"},
                {"name": "group_norm", "num_groups": 4},
                {"name": "batch_norm", "epsilon": 1e-5},
            ]
        ),
    }
    if spec.name in special:
        strategy = special[spec.name]
    elif spec.choices:
        strategy = st.sampled_from(spec.choices)
    elif spec.is_bool:
        strategy = st.booleans()
    elif spec.kind.metavar == "DICT":
        strategy = _DICTS
    elif spec.kind.metavar.startswith("INT"):
        strategy = st.integers(int(spec.within.minimum or 0), int(spec.within.maximum))
    elif spec.kind.metavar == "FLOAT":
        minimum, maximum, above, below = spec.within
        most = maximum if below is None else below
        strategy = st.floats(minimum or 0, most, exclude_min=above is not None, exclude_max=True)
    elif spec.kind is FRACTION:
        strategy = st.floats(LEAST_FRACTION, spec.within.maximum)
    elif spec.name == "freeze":
        strategy = st.integers(1, 10**6).map(str) | st.lists(_NAMES, min_size=1, max_size=3).map(",".join)
    else:
        strategy = _WORDS.map(Path) if spec.kind in (SAVED_FILE, DIRECTORY) else _WORDS
    return st.none() | strategy if spec.optional else strategy


def test_all_samples_may_be_padded_to_the_usual_number_of_weight_updates():
    flags = {"pad_dataset": True, "weight_updates_per_epoch": "-1"}
    assert resolve("train", flags, model="lenet", needs_data=False).config.pad_dataset


@tries(30, slow=100)
@given(st.fixed_dictionaries({spec.name: _values(spec) for spec in SPECS if spec.in_yaml}))
def test_config_yml_round_trip_is_exact(settings):
    config = RunConfig(**settings)
    text = config.to_yaml()
    assert RunConfig.from_yaml(text) == config
    for spec in SPECS:
        assert (f"\n{spec.key}:" in "\n" + text) == spec.in_yaml


@pytest.mark.parametrize("character", ["\x85", "\u2028", "\u2029", "é"])
def test_every_character_of_a_path_survives_config_yml(character):
    config = RunConfig(run_dir=Path(f"a{character}b"))
    assert RunConfig.from_yaml(config.to_yaml()) == config


def test_a_folder_called_tilde_or_imagenet_is_meant_if_it_is_written_as_one():
    config = RunConfig.from_yaml("run-dir: ./~mine\nweights: ./imagenet\n")
    assert (config.run_dir, config.weights) == (Path("~mine"), "./imagenet")
    assert RunConfig.from_yaml(config.to_yaml()) == config


def test_lists_and_dictionaries_have_one_line_each_in_config_yml():
    lines = RunConfig(wandb_tags=("a", "b"), optimizer_params={"momentum": 0.9}).to_yaml().splitlines()
    assert {"wandb-tags: [a, b]", "optimizer-params: {momentum: 0.9}", "pipeline-splits: []"} <= set(lines)


def test_an_empty_config_is_the_defaults():
    assert RunConfig.from_yaml("") == RunConfig()


def test_deterministic_turns_shuffling_off_and_refuses_a_typed_shuffle(tmp_path):
    file = tmp_path / "configs.yml"
    file.write_text("both:\n  deterministic: True\n  shuffle: True\n", encoding="utf-8")
    for resolved in (
        resolve("train", {"deterministic": True}, model="toy_model"),
        resolve("train", {}, model="toy_model", config_name="both", config_path=str(file)),
        resolve("train", {"deterministic": True, "shuffle": False}, model="toy_model"),
    ):
        assert resolved.config.deterministic and not resolved.config.shuffle
        assert resolved.origins["shuffle"].is_given == (str(resolved.origins["shuffle"]) != "deterministic")
    flags, words = {"deterministic": True, "shuffle": True}, "--shuffle contradicts deterministic"
    check_raises(ConfigurationError, words, "", resolve, "train", flags, model="toy_model")
    assert resolve("train", {"shuffle": True}, model="toy_model").config.shuffle


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ({}, 2),
        ({"ckpts_per_epoch": "1"}, None),  # somebody chose how many are written
        ({"ckpts_per_epoch": "1", "keep_checkpoints": "5"}, 5),
    ],
)
def test_chosen_checkpoints_are_all_kept(typed, kept):
    assert resolve("train", typed, model="lenet").config.keep_checkpoints == kept


@pytest.mark.parametrize("name", ["host_generated_data", "device_generated_data"])
def test_a_typed_data_set_takes_the_place_of_generated_data(name):
    saved = RunConfig(model_name="lenet", **{name: True})
    assert getattr(resolve_saved("evaluate", saved, {}, reads_data=False).config, name)
    config = resolve_saved("evaluate", saved, {"dataset": "digits"}, reads_data=False).config
    assert config.dataset == "digits" and not getattr(config, name)


@pytest.mark.parametrize(("schedule", "rate"), [("stepped", None), ("cosine", 0.1)])
def test_stepped_replaces_the_learning_rate_of_the_preset(schedule, rate, tmp_path):
    (tmp_path / "mine.yml").write_text("model-name: lenet\nlearning-rate: 0.1\n")
    path = str(tmp_path / "mine.yml")
    config = resolve("train", {"lr_schedule": schedule}, config_path=path, reads_data=False).config
    assert config.learning_rate == rate


@pytest.mark.parametrize(
    ("ipus", "splits", "mapping"), [("1", (), None), ("2", ("max_pooling2d_1",), (0, 1)), ("4", (), None)]
)
def test_splits_of_a_preset_go_with_another_number_of_stages(ipus, splits, mapping, tmp_path):
    text = "model-name: mnist_cnn\npipeline-splits: [max_pooling2d_1]\ndevice-mapping: [0, 1]\n"
    (tmp_path / "mine.yml").write_text(text + "gradient-accumulation-count: 24\n")
    path = str(tmp_path / "mine.yml")
    config = resolve("train", {"ipus_per_replica": ipus}, config_path=path, reads_data=False).config
    assert (config.pipeline_splits, config.device_mapping) == (splits, mapping)
