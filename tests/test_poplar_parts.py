"""Parts of the Poplar session: the progress bar, flags, feeding, preprocessing, several instances."""

import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from poplar_double import installed, rules
from poplar_double.facts import FACTS
from support.poprun import poprun
from support.refusals import check_raises
from support.sessions import make_program

from ipucnn import cli
from ipucnn.config.options import RunConfig
from ipucnn.datasets.base import DatasetInfo
from ipucnn.datasets.pixels import INPUT_RANGES, InputRange, Transfer
from ipucnn.errors import ConfigurationError
from ipucnn.sessions.group import Alone, Popdist, find_instances
from ipucnn.sessions.poplar import checks
from ipucnn.sessions.poplar.batches import BatchStream, training_batches
from ipucnn.sessions.poplar.device import stdout_on_stderr
from ipucnn.sessions.poplar.model import Preprocess, SeededDropout
from ipucnn.sessions.poplar.sdk_environment import parse_flags, poplar_flags

FLOAT = Transfer("float32")


def test_flags_keep_the_users_own_and_are_known_to_the_driver(tmp_path):
    config = RunConfig(executable_cache=tmp_path / "a")
    config = dataclasses.replace(config, device_generated_data=True)
    value = poplar_flags(config, "--max_infeed_threads=4 --show_progress_bar=auto")
    words = dict(word.partition("=")[::2] for word in value.split())
    assert words["--show_progress_bar"] == "auto" and words["--max_infeed_threads"] == "4"
    assert words["--executable_cache_path"] == str(tmp_path / "a")
    assert "--use_synthetic_data" in words
    assert {name[2:] for name in words} <= set(FACTS["flags"])
    with pytest.raises(ConfigurationError, match="--compile-only"):
        poplar_flags(RunConfig(compile_only=True), "")


def read_by_the_driver(text):
    """Reads flags as compiler/xla/parse_flags_from_env.cc of TensorFlow 2.6 does, character by character."""
    flags, at = [], 0
    while True:
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        if at == len(text) or text[at] != "-":
            assert at == len(text), f"not read: {text[at:]}"
            return flags
        word = ""
        while at < len(text) and text[at].isascii() and (text[at].isalnum() or text[at] in "-_"):
            word, at = word + text[at], at + 1
        if text[at : at + 2] in ("='", '="'):
            quote, word, at = text[at + 1], word + "=", at + 2
            while at < len(text) and text[at] != quote:
                if quote == '"' and text[at] == "\\":
                    at += 1
                word, at = word + text[at], at + 1
            at += 1
        else:
            while at < len(text) and text[at] not in " \t\r\n":
                word, at = word + text[at], at + 1
        flags.append(word)


@given(st.text(alphabet=" '\"\\aé$#=-\n\t", min_size=1, max_size=8))
def test_driver_reads_the_executable_cache_option(name):
    config = RunConfig(executable_cache=Path("/cache/" + name + "x"))
    mine = "--executable_cache_path=" + os.path.abspath("/cache/" + name + "x")
    text = poplar_flags(config, "--tensor_map_file_path='/a b' ")
    theirs = ["--tensor_map_file_path=/a b", "--show_progress_bar=false", mine]
    assert read_by_the_driver(text) == theirs == shlex.split(text)
    assert list(parse_flags(text)) == [word[2:].partition("=")[0] for word in theirs]


def test_output_while_ipus_run_goes_to_stderr(capfd):
    with stdout_on_stderr():
        os.write(1, b"from C++\n")
    print("result")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("result\n", "from C++\n")


def test_progress_bar_of_the_driver_is_shown_only_to_a_person(monkeypatch):
    for name, value in (("CI", ""), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    for is_terminal, flag in ((True, "true"), (False, "false")):
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda answer=is_terminal: answer))
        assert poplar_flags(RunConfig(), "") == f"--show_progress_bar={flag}"
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setenv("CI", "true")
    assert poplar_flags(RunConfig(), "") == "--show_progress_bar=false"


def dataset(program, weights=None):
    count = program.global_batch_size * 3
    images = np.arange(count, dtype=np.float32)[:, None, None, None]
    parts = (images, np.arange(count, dtype=np.int64) % 7)
    parts = parts if weights is None else (*parts, weights)
    return tf.data.Dataset.from_tensor_slices(parts).batch(program.micro_batch_size, drop_remainder=True)


def test_feeding_types_seeds_and_weights_of_padding():
    program = make_program(2, 3, 2, updates_per_epoch=2, samples_padded_per_epoch=4, seed=9)
    weights = np.ones(36, np.float32)
    weights[20:24] = 0
    batches = list(training_batches(dataset(program, weights), program, 0, True, Transfer("uint8"), Alone()))
    assert len(batches) == 18
    rules.check_feed(tf.nest.map_structure(tf.TensorSpec.from_tensor, batches[0]))  # IPUs accept these types
    (images, seeds), labels, _ = batches[7]
    assert images.dtype == tf.uint8 and labels.dtype == tf.int32 and images.shape == (2, 1, 1, 1)
    assert seeds.numpy().tolist() == [[9, 7], [9, 7]]
    # Weight updates 0, 1, 2: the second ends the epoch, and 8 of its 12 samples count.
    fed_weights = np.concatenate([b[2].numpy() for b in batches])
    np.testing.assert_allclose(fed_weights, np.concatenate([np.ones(12), [1.5] * 8, [0] * 4, np.ones(12)]))


def test_executions_continue_where_the_previous_one_stopped():
    """Their inputs in sequence are those of one data set, and the pipeline starts once."""
    program, started = make_program(2, 3, 2), []

    def images():
        started.append(len(started))
        for number in range(100):
            yield np.full([2, 1, 1, 1], number, np.float32), np.array([number % 7, 3])

    signature = (tf.TensorSpec([2, 1, 1, 1], tf.float32), tf.TensorSpec([2], tf.int64))
    source = tf.data.Dataset.from_generator(images, output_signature=signature)
    batches = training_batches(source, program, 5, True, FLOAT, Alone())
    whole = [tf.nest.map_structure(np.ravel, element) for element in batches.take(12).as_numpy_iterator()]
    started.clear()
    stream, elements = BatchStream(batches), []
    for count in (5, 1, 6):
        part = stream.take(count)
        assert int(part.cardinality()) == count and part.element_spec == batches.element_spec
        elements += [tf.nest.map_structure(np.ravel, element) for element in part.as_numpy_iterator()]
    assert str(elements) == str(whole) and len(started) == 1


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_instances_share_the_micro_batches_of_every_step(count):
    """Together they have each micro-batch once, and in each accumulation step one for each of their replicas."""
    program = make_program(1, 3, 4)
    whole = [
        float(np.ravel(b[0])[0])
        for b in training_batches(dataset(program), program, 0, False, FLOAT, Alone())
    ]
    parts = []
    for index in range(count):
        instances = Popdist(count, index, 1, 4)
        share = dataset(program).shard(count, index)
        batches = training_batches(share, program, 0, True, FLOAT, instances)
        parts.append([float(np.ravel(b[0][0])[0]) for b in batches])
        # Seeds follow the micro-batch's number among all instances.
        numbers = [int(b[0][1][0, 1]) for b in batches]
        assert numbers == list(range(len(whole)))[index::count]
    local = 4 // count
    for step in range(len(whole) // 4):
        values = [value for part in parts for value in part[step * local : (step + 1) * local]]
        assert sorted(values) == whole[step * 4 : (step + 1) * 4]


INFO = DatasetInfo(
    **{
        field.name: {"mean": (10.0, 20.0, 30.0), "std": (5.0, 6.0, 7.0)}.get(field.name)
        for field in dataclasses.fields(DatasetInfo)
    }
)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("input_range", INPUT_RANGES)
def test_preprocessing_on_the_ipu_is_that_of_the_pipeline(input_range, channels):
    images = np.random.default_rng(0).integers(0, 256, (2, 5, 4, channels)).astype(np.uint8)
    expected = InputRange.of(input_range, INFO, channels).apply(tf.cast(images, tf.float32))
    affine = InputRange.of(input_range, INFO, channels)
    layer = Preprocess(affine, None, "float32")
    np.testing.assert_allclose(layer(tf.constant(images)), expected, rtol=1e-5, atol=1e-5)
    if channels == 3 and not (affine.reverse or affine.per_image):
        fused = fused_preprocessing(affine, images.astype(np.float32))
        np.testing.assert_allclose(fused, expected, rtol=1e-5, atol=1e-5)


def fused_preprocessing(affine, images):
    with installed():
        from tensorflow.python import ipu

        return Preprocess(affine, ipu.image_ops.normalise_image, "float32")(tf.constant(images))


def test_fused_preprocessing_of_8_bit_pixels_gives_the_type_that_was_asked_for():
    images = np.random.default_rng(0).integers(0, 256, (2, 5, 4, 3)).astype(np.uint8)
    expected = InputRange.of("torch", INFO, 3).apply(tf.cast(images, tf.float32))
    normalised = fused_preprocessing(InputRange.of("torch", INFO, 3), images)
    # The operation rounds to halves.
    np.testing.assert_allclose(normalised, expected, rtol=5e-3, atol=5e-3)
    assert normalised.shape == expected.shape and normalised.dtype == tf.float32


def test_dropout_masks_are_those_of_the_host_for_several_micro_batches():
    from ipucnn.models.layers.micro_batches import Dropout, ExecutionContext, execution_context

    x = tf.ones([6, 4, 4, 3])
    numbers = [[3, 10], [3, 11], [3, 12]]
    for noise in (None, (None, 1, 1, 1)):
        host = Dropout(0.5, noise, name="drop")
        with execution_context(ExecutionContext(3, tf.constant(numbers), 3)):
            expected = host(x, training=True)
        ipu = SeededDropout(0.5, noise, 2, name="drop")
        seeds = tf.constant(np.repeat(numbers, 2, axis=0), tf.int32)
        np.testing.assert_array_equal(ipu([x, seeds], training=True), expected)
        np.testing.assert_array_equal(ipu([x, seeds], training=False), x)


def test_poprun_variables_are_read(monkeypatch):
    assert find_instances({}) == Alone()
    poprun(monkeypatch, 1)
    instances = find_instances()
    assert instances == Popdist(2, 1, 1, 4) and instances.under_poprun
    checks.check_layout(instances, make_program(1, 1, 4), RunConfig())
    for changes, text in (
        ({"replicas": 2}, "--num-replicas 4"),
        ({"ipus_per_replica": 2}, "--ipus-per-replica 2"),
    ):
        other = make_program(1, 1, **{"replicas": 4, **changes})
        check_raises(ConfigurationError, "", text, checks.check_layout, instances, other, RunConfig())


@pytest.mark.slow
def test_metrics_reduced_on_the_ipus_are_means_over_replicas(monkeypatch, tmp_path, capfd):
    """SDK 3.0 does not reduce them itself: the result equals the later SDK's."""
    losses = []
    flags = shlex.split(
        "--num-replicas 2 --micro-batch-size 2 --limit-train 16 --no-validation --num-epochs 1"
    )
    for sdk, more in (("3.4", []), ("3.0", ["--accelerator-side-reduction"]), ("3.0", [])):
        run = tmp_path / f"run{len(losses)}"
        with installed(sdk=sdk):
            command = ["train", "toy_model", "--seed", "1", "--run-dir", str(run), *flags, *more]
            assert cli.run(command) == 0, capfd.readouterr().err
        shown = capfd.readouterr().err
        assert ("those of the last replica: SDK 3.0" in shown) == ((sdk, more) == ("3.0", []))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses.append(rows[0]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] != pytest.approx(losses[0], rel=1e-5)  # only the last replica's
