"""The test double itself: its computations, and the exchange between instances, against naive versions."""

import contextlib
import importlib
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf
from poplar_double import Machine, ProcessAborted, installed, rules
from poplar_double.exchange import Alone, Exchange
from poplar_double.replicas import Reductions, Replicas, combine
from poplar_mutations.setting import plain
from support.poprun import poprun
from support.sessions import chain
from tensorflow import keras

PROCESSES = "experimental.multi_replica_distribution.process_count"


def together(count, work):
    """Runs ``work(index)`` in threads; returns the results, or raises the first error."""
    results, errors = [None] * count, []

    def run(index):
        try:
            results[index] = work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


# --- the exchange ------------------------------------------------------------------------------------------


def test_every_instance_gets_the_arrays_of_all(tmp_path):
    def work(index):
        exchange = Exchange(tmp_path, index, 3, timeout_s=30)
        return [exchange.gather("sum", [np.full(2, index + 10 * n), index]) for n in range(5)]

    for gathered in together(3, work):
        for n, parts in enumerate(gathered):
            assert [p[0].tolist() for p in parts] == [[i + 10 * n] * 2 for i in range(3)]
            assert [int(p[1]) for p in parts] == [0, 1, 2]
    # Each instance's last file stays: no instance knows whether the others have read it.
    assert len(list(tmp_path.rglob("*.npz"))) == 3 and not list(tmp_path.rglob("*.tmp"))


def test_missing_or_diverging_instance_is_an_error(tmp_path):
    with pytest.raises(TimeoutError, match="waits for instance 1 at gradients"):
        Exchange(tmp_path / "a", 0, 2, timeout_s=0.05).gather("gradients", [1.0])
    with pytest.raises(RuntimeError, match=r"at (gradients|metrics)"):
        together(2, lambda i: Exchange(tmp_path / "b", i, 2, 5).gather(("gradients", "metrics")[i], [1.0]))
    with pytest.raises(RuntimeError, match="another run's"):
        Exchange(tmp_path / "a", 0, 2, timeout_s=0.05).gather("gradients", [1.0])


def machine_of(folder, index, count):
    machine = Machine(config={"leaves": {PROCESSES: count}, "ipus": 2})
    machine._exchange = Exchange(folder, index, count, 30) if folder else Alone(count)
    return machine


def test_gradients_and_metrics_are_reduced_over_the_replicas_of_all_instances(tmp_path):
    gradients = np.arange(8, dtype=np.float32).reshape(2, 2, 2)  # instance, replica, weight

    def work(index):
        machine = machine_of(tmp_path, index, 2)
        replicas = Replicas(machine, None)
        total = replicas.sum_gradients([[tf.constant(g) for g in one] for one in gradients[index]])
        metrics = combine(machine, [{"loss": float(index * 2 + r)} for r in range(2)], mean=True)
        reductions = Reductions(machine)
        for replica in range(2):
            reductions.reduction_of(np.float32(index * 2 + replica), mean=True)
            reductions.reduction_of(np.float32(7), mean=False)
        reductions.close(2)
        return (
            [float(t) for t in total],
            metrics,
            float(reductions.reduction_of(np.float32(0), True)),
            float(reductions.reduction_of(0, False)),
        )

    for total, metrics, mean, whole in together(2, work):
        assert total == gradients.sum(axis=(0, 1)).tolist()
        assert metrics == {"loss": 1.5} and mean == 1.5 and whole == 28.0


def test_without_a_folder_other_instances_have_the_same_values():
    machine = machine_of(None, 0, 3)
    (total,) = Replicas(machine, None).sum_gradients([[tf.constant(1.0)], [tf.constant(2.0)]])
    assert float(total) == 9.0 and combine(machine, [{"a": 2.0}, {"a": 4.0}], True) == {"a": 3.0}


# --- popdist and the devices -------------------------------------------------------------------------------


@pytest.mark.parametrize(("index", "local", "ipus", "device"), [(0, 1, 1, 0), (1, 2, 1, 17), (1, 2, 2, 25)])
def test_set_ipu_config_selects_the_device_of_the_instance(monkeypatch, index, local, ipus, device):
    """16 IPUs are devices 0 to 15, their pairs 16 to 23, their fours 24 to 27."""
    poprun(monkeypatch, index, total=2 * local, local=local, ipus=ipus)
    with installed() as machine:
        import popdist
        import popdist.tensorflow
        from tensorflow.python import ipu

        config = ipu.config.IPUConfig()
        popdist.tensorflow.set_ipu_config(config, ipus_per_replica=ipus, configure_device=True)
        assert config.select_ipus == [device]
        assert config.experimental.multi_replica_distribution.process_count == 2
        assert config.experimental.multi_replica_distribution.process_index == index
        config.configure_ipu_system()
        assert machine.device_ipus == local * ipus
        # The driver counts the IPUs of all instances.
        assert ipu.utils.get_num_of_ipus_in_device("/device:IPU:0") == 2 * local * ipus


def test_instances_may_not_take_the_first_ipus_that_are_free(monkeypatch):
    poprun(monkeypatch)
    with installed():
        import popdist.tensorflow
        from tensorflow.python import ipu

        config = ipu.config.IPUConfig()
        config.auto_select_ipus = 2
        popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1, configure_device=False)
        with pytest.raises(RuntimeError, match="getDeviceId"):
            config.configure_ipu_system()
        config.device_connection.version = "ipu2"
        config.device_connection.type = ipu.config.DeviceConnectionType.PRE_COMPILE
        config.configure_ipu_system()  # this takes no device


def test_device_0_is_distinguished_from_no_device():
    with installed() as machine:
        from tensorflow.python import ipu

        config = ipu.config.IPUConfig()
        config.select_ipus = 0
        config.configure_ipu_system()
        assert config.select_ipus == [0] and machine.device_ipus == 1
        # Beside a number of IPUs 0 counts as unset, but it still selects the first device.
        config = ipu.config.IPUConfig()
        config.select_ipus, config.auto_select_ipus = 0, 4
        config.configure_ipu_system()
        assert machine.device_ipus == 1
        config = ipu.config.IPUConfig()
        config.select_ipus, config.auto_select_ipus = [0], 4
        with pytest.raises(Exception, match="Only one of"):
            config.configure_ipu_system()
    with installed(num_ipus=0):
        from tensorflow.python import ipu

        config = ipu.config.IPUConfig()
        config.device_connection.version = "ipu2"
        config.device_connection.type = ipu.config.DeviceConnectionType.PRE_COMPILE
        config.select_ipus = 0
        with pytest.raises(ProcessAborted):
            config.configure_ipu_system()


def test_host_reductions(monkeypatch):
    poprun(monkeypatch)
    with installed():
        import popdist
        from tensorflow.python import ipu

        assert not hasattr(ipu, "distributed") and not hasattr(popdist, "tensorflow")
        from tensorflow.python.ipu import distributed

        assert ipu.distributed is distributed and not hasattr(distributed, "Sum")
        popdist.init()
        value, op = tf.constant([1.0, 2.0]), tf.distribute.ReduceOp
        assert distributed.allreduce(value, op.SUM).numpy().tolist() == [2.0, 4.0]
        assert distributed.allreduce(value, op.MEAN).numpy().tolist() == [1.0, 2.0]
        assert tf.function(lambda v: distributed.allreduce(v, op.SUM))(value).numpy().tolist() == [2.0, 4.0]
    with installed(sdk="3.0"):
        from tensorflow.python.ipu import distributed

        distributed.init()
        assert distributed.allreduce(value, op=distributed.Sum).numpy().tolist() == [2.0, 4.0]
        assert distributed.allreduce(value).numpy().tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("local", "processes", "is_refused"), [(4, 8, True), (4, 4, False), (16, 2, False)])
def test_state_is_shared_out_within_an_ipu_link_domain(local, processes, is_refused):
    """With several instances in each of several domains of 16 IPUs, the driver does not share state out."""
    leaves = {PROCESSES: processes}
    machine = Machine(num_ipus=16, config={"leaves": leaves, "ipus": local})
    rules.check_shared_out_state(machine, {}, local)
    keywords = {"replicated_optimizer_state_sharding": True}
    with pytest.raises(tf.errors.UnimplementedError) if is_refused else contextlib.nullcontext():
        rules.check_shared_out_state(machine, keywords, local)


# --- models ------------------------------------------------------------------------------------------------


def test_programs_without_a_device_return_zeros(monkeypatch, tmp_path):
    """Also for variables that the program writes; a dequeue returns one element, however many an execution has."""
    monkeypatch.setenv("TF_POPLAR_FLAGS", f"--executable_cache_path={tmp_path}")
    with installed() as machine:
        from tensorflow.python import ipu

        setting = plain(ipu)
        setting.config.auto_select_ipus = 2
        setting.config.device_connection.version = "ipu2"
        setting.config.device_connection.type = ipu.config.DeviceConnectionType.PRE_COMPILE
        setting.optimizer = "adam"
        setting.before = lambda model: setattr(model.layers[1], "trainable", False)
        model = setting.fit()
        assert model.history.history == {"loss": [0.0]}
        kept, written = model.layers[1].get_weights(), model.layers[-1].get_weights()
        assert kept[0].any() and not written[0].any()
        assert int(model.optimizer.iterations.numpy()) == 0
        # Two executions of four micro-batches of two, on each of two replicas.
        outputs = model.predict(np.ones((32, 4, 4, 1), np.float32), batch_size=2)
        assert outputs.shape == (8, 3) and not outputs.any()
        assert len(machine.programs) == 2 and len(list(tmp_path.glob("*.poplar_exec"))) == 2


def test_programs_compiled_without_a_device_never_run():
    with installed() as machine:
        from tensorflow.python import ipu

        setting = plain(ipu)
        setting.config.device_connection.version = "ipu2"
        setting.config.device_connection.type = ipu.config.DeviceConnectionType.NEVER
        with pytest.raises(tf.errors.InvalidArgumentError, match="configured for compilation only"):
            setting.fit()
        assert len(machine.programs) == 1


def unused_weight(**shape):
    class Unused(keras.layers.Layer):
        def build(self, input_shape):
            self.unused = self.add_weight(name="unused", shape=(1,), initializer="ones")
            super().build(input_shape)

        def call(self, x):
            return x

    return chain((4, 4, 1), keras.layers.Flatten(), Unused(), keras.layers.Dense(3), batch_size=2)


def test_weight_without_a_gradient_is_refused():
    with installed():
        from tensorflow.python import ipu

        with pytest.raises(ValueError, match="has `None` for gradient"):
            plain(ipu, model=unused_weight).fit()
        with pytest.raises(ValueError, match="has `None` for gradient"):
            plain(ipu, model=unused_weight, arguments={}).fit()


def test_weight_updates_are_made_in_a_graph():
    class Eager(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, **kwargs):
            pairs = list(grads_and_vars)
            float(pairs[0][0].numpy().sum())
            return super().apply_gradients(pairs, **kwargs)

    with installed():
        from tensorflow.python import ipu

        with pytest.raises(Exception, match="numpy"):
            plain(ipu, optimizer=Eager()).fit()


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_variables_that_a_program_writes_must_be_on_the_ipus(where):
    """A variable made outside of the strategy's scope is on the host."""
    # Not a layer's own variable: Keras checks those itself.
    held = [tf.Variable(0.0, trainable=False)]

    class Counting(keras.layers.Layer):
        def call(self, x):
            held[-1].assign_add(1.0)
            return x

    def network():
        if where == "inside":
            held.append(tf.Variable(0.0, trainable=False))
        return chain((4, 4, 1), Counting(), keras.layers.Flatten(), keras.layers.Dense(3), batch_size=2)

    with installed():
        from tensorflow.python import ipu

        setting = plain(ipu, model=network)
        if where == "inside":
            setting.fit()
            return
        with pytest.raises(tf.errors.InvalidArgumentError, match="located in device CPU:0"):
            setting.fit()


@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
def test_batch_norm_of_16_bits_keeps_all_variables_in_16_bits(policy):
    def network():
        norm = keras.layers.BatchNormalization(dtype=keras.mixed_precision.Policy(policy), name="norm")
        end = keras.layers.Flatten(), keras.layers.Dense(3, dtype="float32")
        return chain((4, 4, 1), norm, *end, batch_size=2, dtype="float16")

    images = np.random.default_rng(0).normal(1, 2, (64, 4, 4, 1)).astype(np.float16)
    arrays = images, np.zeros(64, np.int32)
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(2, drop_remainder=True).repeat()
    with installed():
        from tensorflow.python import ipu

        weights = plain(ipu, model=network, data=data).fit().get_layer("norm").get_weights()
    rounded = [np.array_equal(w, w.astype(np.float16)) for w in weights]
    assert all(rounded) if policy == "float16" else not any(rounded)


def test_images_get_a_fourth_channel():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 3)).astype(np.uint8)
    offsets, scales = np.array([1.0, 2.0, 3.0], np.float32), np.array([0.5, 0.25, 2.0], np.float32)
    with installed():
        from tensorflow.python import ipu

        for dtype, result in ((np.uint8, np.float16), (np.float16, np.float16), (np.float32, np.float32)):
            image = tf.constant(pixels.astype(dtype))
            normalised = ipu.image_ops.normalise_image(image, offsets, tf.constant(scales), 1 / 256).numpy()
            assert normalised.shape == (2, 3, 4, 4) and normalised.dtype == result
            expected, tolerance = (pixels / 256 - offsets) * scales, 5e-3 if result == np.float16 else 1e-6
            np.testing.assert_allclose(normalised[..., :3], expected, rtol=0, atol=tolerance)
            assert not normalised[..., 3].any()


def test_every_import_of_keras_has_the_sdk_parts_until_the_double_is_removed():
    """With TensorFlow 2.6 ``import tensorflow.keras`` makes another module than ``from tensorflow import keras``."""
    keras.Model  # noqa: B018 (it is loaded)
    from tensorflow import keras as loaded

    second = importlib.import_module("tensorflow.keras")
    places = (keras, loaded, second, tf.keras)
    with installed():
        assert all(place.ipu.ReplicatedMetricReductionMethod for place in places)
    assert not any(hasattr(place, "ipu") for place in places)
    assert "tensorflow.python.ipu" not in sys.modules
    assert not hasattr(keras.Sequential([keras.layers.Dense(1)]), "set_pipelining_options")
