"""Preset files: anchors, merges, invalid keys with their line, and the layout of public files."""

import re
from pathlib import Path

import pytest
from support.refusals import check_raises
from support.scripts import load_script

from ipucnn.config import presets
from ipucnn.config.options import BY_KEY, find_spec
from ipucnn.config.presets import PresetFile, built_in_files, built_in_names, keys_in_presets, load_preset
from ipucnn.config.resolve import resolve
from ipucnn.errors import ConfigurationError
from ipucnn.models.build import BuildOptions
from ipucnn.models.registry import get_model, list_models
from ipucnn.planning.graphs.extract import layer_graph
from ipucnn.training.program import make_program

PUBLIC_STYLE = Path(__file__).parent / "data" / "public_style.yml"
OF_CIFAR10 = {"dataset": "cifar10", "model_name": "toy_model", "precision": "16.16", "num_epochs": 3}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "small_lars",
            {
                "model_name": "cifar_resnet8",
                "precision": "32.32",
                "l2_regularization": 2e-5,
                "optimizer_params": {"eeta": 0.002, "momentum": 0.9, "epsilon": 0, "weight_decay": 1.5e-6},
            },
        ),
        (
            "small_scaled",
            {
                "stochastic_rounding": "RI",
                "logs_per_epoch": 0.5,
                "norm_layer": {"name": "custom_batch_norm", "momentum": 0.97},
            },
        ),
        # Plain keys win over merged ones.
        (
            "segments_lars",
            {
                "dataset": "imagenet",
                "micro_batch_size": 20,
                "device_mapping": (0, 0, 0, 0, 0, 0, 0),
                "available_memory_proportion": (20.0,),
            },
        ),
        ("two_merges", OF_CIFAR10),
        ("list_of_merges", OF_CIFAR10),
    ],
)
def test_public_layout_loads_unchanged(name, expected):
    values = PresetFile(PUBLIC_STYLE.read_text(), "configs.yml").get(name).values
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize(
    "text, line",
    [
        ("m:\n  epochs: 4\n  num-epochs: 5\n", 3),
        ("m:\n  micro-batch-size: 4\n  micro_batch_size: 4\n", 3),
        ("b: &b\n  epochs: 4\nm:\n  <<: *b\n  model: lenet\n  model-name: resnet18\n", 6),
    ],
)
def test_two_spellings_of_an_option_are_an_error(tmp_path, text, line):
    path = tmp_path / "mine.yml"
    path.write_text(text)
    check_raises(ConfigurationError, f"line {line}", "keep one", load_preset, "m", path)
    for text in (
        "b: &b\n  epochs: 4\nm:\n  <<: *b\n  num-epochs: 5\n",
        "m: {<<: {epochs: 4}, num-epochs: 5}\n",
    ):
        path.write_text(text)
        assert load_preset("m", path).values == {"num_epochs": 5}


def test_presets_do_not_affect_each_other():
    file = PresetFile(PUBLIC_STYLE.read_text(), "configs.yml")
    assert file.names[:4] == ["photographs", "gc_photographs", "thumbnails", "first_steps"]
    before = [file.get(name) for name in file.names]
    assert [file.get(name) for name in reversed(file.names)] == before[::-1]
    assert file.get("thumbnails").values == {"dataset": "cifar10", "dataset_path": Path("/somewhere/else")}


def test_only_the_chosen_preset_is_checked():
    file = PresetFile("good:\n  seed: 1\nbad:\n  sede: 1\n", "mine.yml")
    assert file.get("good").values == {"seed": 1}


def test_a_saved_config_is_a_preset(tmp_path):
    path = tmp_path / "config.yml"
    path.write_text("model-name: lenet\nnum-epochs: 4\n")
    assert presets.load_preset(None, str(path)).values == {"model_name": "lenet", "num_epochs": 4}


def test_a_run_on_digits_for_want_of_files_is_repeated_with_its_configuration(here):
    first = resolve("train", {}, model="lenet").config
    assert first.dataset == "digits"
    Path("config.yml").write_text(first.to_yaml())
    assert resolve("train", {}, config_path="config.yml").config.dataset == "digits"


@pytest.mark.slow
def test_built_in_presets_are_valid_and_belong_to_models():
    registry = pytest.importorskip("ipucnn.models.registry")
    names = presets.built_in_names()
    assert len(set(names)) == len(names)
    public = next(file for file in presets.built_in_files() if file.source == "public.yml").names
    for name in public:  # Users choose these by name; they name their model and data.
        values = presets.find_built_in(name).values
        assert registry.get_model(values["model_name"]) and {"dataset", "host_generated_data"} & set(values)
        assert "@" not in name and name not in {record.name for record in registry.list_models()}
    # This preset is for every network.
    assert not {"model_name", "dataset", "image_size"} & set(presets.find_built_in("fine-tuning").values)
    for name in sorted(set(names) - set(public) - {"fine-tuning"}):
        preset = presets.find_built_in(name)
        assert registry.get_model(name.split("@")[0]).name == name.split("@")[0]
        # These are chosen by model and data set, so they must not name others.
        assert not {"model_name", "dataset", "dataset_path"} & set(preset.values)


@pytest.mark.parametrize(
    ("model", "dataset", "name"),
    [
        ("efficientnet-b0", "cifar10", "efficientnet-b0@cifar10"),
        ("efficientnet-b0", "cifar100", "efficientnet-b0@small"),
        ("efficientnet-b1", "cifar10", "efficientnet-b1@small"),
        ("efficientnet-b0", "digits", "efficientnet-b0@digits"),
        ("efficientnet-b0", "imagenet", "efficientnet-b0"),
    ],
)
def test_small_images_have_presets_of_their_own(model, dataset, name):
    assert presets.find_built_in(*presets.candidates(model, dataset)).name == name


def test_every_model_has_a_preset():
    assert [record.name for record in list_models() if presets.find_built_in(record.name) is None] == []


def test_the_u_net_on_four_ipus_has_the_public_stages():
    config = resolve("train", {"dataset": "membranes"}, model="unet", config_name="unet@isbi2012-pod4").config
    program = make_program(config, 24, seed=1)
    assert (program.num_stages, program.num_ipus, program.gradient_accumulation_count) == (4, 4, 24)
    assert len(program.available_memory_proportion) == 4 and not config.optimizer_state_offloading
    assert (program.precision, program.loss_scaling, program.recomputation) == ("16.16", 128, True)
    assert program.weight_updates_per_execution == 10 and program.warnings == ()
    record = get_model("unet")
    graph = layer_graph(record, BuildOptions(record.input_shape, record.num_classes))
    cuts = [graph.index(split) for split in config.pipeline_splits]
    last_layers = ["encoder_block_1_maxpooling", "decoder_block_0_transpose", "decoder_block_2_transpose"]
    assert [graph.layers[cut - 1].name for cut in cuts] == last_layers
    # Skips are cropped on the sending stage: the crop crosses a cut, not the whole tensor.
    for cut in cuts:
        crossing = graph.crossing(cut)
        assert not any(name.startswith("encoder") and name.endswith("relu2") for name in crossing)
    assert {"decoder_block_2_crop", "decoder_block_3_crop"} <= set(graph.crossing(cuts[0]))


def test_a_preset_is_chosen_by_the_number_of_ipus():
    """The command of the public U-Net's README: SGD with momentum 0.99, exponential decay, and loss scaling 128."""
    flags = {"dataset": "isbi2012", "ipus_per_replica": 4, "micro_batch_size": 1, "learning_rate": 0.0024}
    resolved = resolve("train", flags, model="unet", needs_data=False)
    assert resolved.preset == "unet@isbi2012-pod4" and resolved.config.loss_scaling == 128
    assert (resolved.config.optimizer_params, resolved.config.lr_schedule) == (
        {"momentum": 0.99},
        "exponential",
    )
    for other in ({"ipus_per_replica": 2}, {}):
        resolved = resolve("train", {"dataset": "isbi2012", **other}, model="unet", needs_data=False)
        assert resolved.preset == "unet@isbi2012"


SEEDS = Path(__file__).resolve().parents[2] / "shared" / "seeds"


def test_every_published_configuration_has_a_preset_with_its_source():
    published = {one.preset: one for one in load_script("docs/generate.py").published()}
    file = next(file for file in presets.built_in_files() if file.source == "public.yml")
    assert set(published) == {*file.names, "unet@isbi2012-pod4"}
    for one in published.values():
        assert one.source and one.commands and one.system and one.result
    for name in file.names:
        assert resolve("train", {}, config_name=name, needs_data=False).preset == name
    pipeline = resolve("train", {}, config_name="mk2_resnet50_8k_bn_pipeline", needs_data=False).config
    assert (pipeline.num_replicas, pipeline.micro_batch_size, pipeline.global_batch_size) == (4, 16, 8192)
    for schedule in ("grouped", "INTERLEAVED", "Sequential"):
        flags = {"pipeline_schedule": schedule, "lr_schedule": "Cosine"}
        config = resolve("train", flags, model="cifar_resnet8", needs_data=False).config
        assert config.pipeline_schedule == schedule.capitalize() and config.lr_schedule == "cosine"


@pytest.mark.parametrize("name", ["keras_mnist", "keras_mnist_replicas", "keras_mnist_pipeline"])
def test_every_step_of_the_keras_tutorial_moves_weights_by_its_rate(name):
    """Keras on IPUs adds the gradients of all micro-batches of a weight update, and 0.01 is the rate of their sum."""
    config = resolve("train", {}, config_name=name, needs_data=False).config
    is_sum = config.gradient_accumulation_reduction_method == "sum"
    averaged = 1 if is_sum else config.gradient_accumulation_count
    assert config.learning_rate / (config.num_replicas * averaged) == 0.01


@pytest.mark.skipif(not SEEDS.is_dir(), reason="no ../shared/seeds beside the repository")
def test_no_published_command_is_missing():
    listed = {
        " ".join(re.sub(r"--logs-per-epoch \S+|--num-epochs [56](?= )", "", command).split())
        for one in load_script("docs/generate.py").published()
        for command in one.commands
    }
    texts = [path.read_text(encoding="utf-8") for path in SEEDS.glob("*.md")]
    typed = [
        command_line
        for text in texts
        for command_line in re.findall(
            r"^[ `]*(python3? (?:train|main|demo|efficientnet\w+)\.py.*?|python3 --config \S+)`?\s*$",
            text,
            re.M,
        )
    ]
    assert len(typed) > 10
    for command in typed:
        if "your_config" not in command and "`" not in command:  # a template, or a sentence
            plain = " ".join(re.sub(r"--logs-per-epoch \S+|--num-epochs [56](?= )", "", command).split())
            assert plain in listed, command


@pytest.mark.parametrize("head", ["its flag (default)", "its flag"])
def test_the_tables_of_public_flags_name_existing_options(head):
    text = (Path(__file__).parents[1] / "docs" / "migrate.md").read_text()
    rows = text.split(f"| {head} | here |")[1].split("\n\n")[0].splitlines()[2:]
    ours = {flag for row in rows for flag in re.findall(r"--([a-z][a-z0-9-]*)", row.split(" | ")[1])}
    assert len(rows) > 20 and ours - set(BY_KEY) <= {"training", "inference", "config-path"}
    # Options in rows that begin with "the same" exist under that name.
    for row in rows:
        theirs, cell = row.strip("| ").split(" | ")
        if cell.startswith("the same"):
            assert set(re.findall(r"--([a-z0-9-]+)", theirs)) <= {*BY_KEY, "config", "config-path"}, row


def test_keys_in_presets_are_all_options_that_presets_set():
    set_by_some = {
        find_spec(name).key
        for file in built_in_files()
        for preset in file.names
        for name in file.get(preset).values
    }
    assert keys_in_presets() == set_by_some
    assert "micro-batch-size" in set_by_some and "seed" not in set_by_some


@pytest.mark.parametrize("flags, expected", [({}, 5), ({"num_epochs": "10"}, 2), ({"num_epochs": "3"}, 1)])
def test_a_short_run_has_five_validations_unless_the_user_sets_another_number(flags, expected):
    flags = {"dataset": "digits", **flags}
    assert resolve("train", flags, model="efficientnet-b0").config.validation_freq == expected
    flags["validation_freq"] = "8"
    assert resolve("train", flags, model="efficientnet-b0").config.validation_freq == 8


def test_every_unshortened_preset_has_five_validations():
    for name in built_in_names():
        model, _, rest = name.partition("@")
        if rest in ("small", "digits"):
            config = resolve("train", {"dataset": "digits"}, model=model).config
            assert config.num_epochs // config.validation_freq >= min(5, config.num_epochs), name


@pytest.mark.parametrize(
    "flags, micro_batch",
    [({}, 32), ({"num_replicas": "4"}, 8), ({"global_batch_size": "8"}, 1), ({"micro_batch_size": "3"}, 3)],
)
def test_a_network_from_a_file_has_a_global_batch_of_32(flags, micro_batch, here):
    (here / "net.py").write_text("def build(input_shape, num_classes):\n    return None\n")
    resolved = resolve("train", {"dataset": "digits", **flags}, model="net.py:build")
    assert resolved.config.micro_batch_size == micro_batch
    assert (str(resolved.origins["micro_batch_size"]) == "own network") == (micro_batch in (32, 8))


def test_a_merged_value_that_is_overridden_is_not_checked(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text(
        "base: &base\n  micro-batch-size: 0x20\n  seed: 3\ntwo:\n  <<: *base\n  model: lenet\n  micro-batch-size: 16\n"
    )
    resolved = resolve("train", {}, config_name="two", config_path=str(path))
    assert (resolved.config.micro_batch_size, resolved.config.seed) == (16, 3)
