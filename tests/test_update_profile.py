"""The profile of a weight update: what each operation does at least, and which kind it is."""

import pytest
import tensorflow as tf
from support.scripts import load_script

from ipucnn.sessions.host import operations


@pytest.fixture(scope="module")
def profiled():
    return load_script("benchmarks/update_profile.py")


def costs(module, function, *shapes, weights=()):
    """Returns the costs of the operations of a function's graph, by their type without oneDNN's names."""
    specs = [tf.TensorSpec(shape) for shape in shapes]
    graph = tf.function(function).get_concrete_function(*specs).graph
    return {op.type: module.cost(op, frozenset(weights)) for op in module.operations(graph)}


def test_a_convolution_and_its_gradients_have_the_multiplications_of_a_loop(profiled):
    def step(x, kernel):
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            y = tf.nn.conv2d(x, kernel, 2, "SAME")
        return tape.gradient(y, [x, kernel])

    found = costs(profiled, step, (2, 9, 7, 3), (3, 3, 3, 5))
    # Each of the 2 x 5 x 4 x 5 outputs adds 3 x 3 x 3 products.
    flop = 2 * (2 * 5 * 4 * 5) * (3 * 3 * 3)
    image, kernel, output = 2 * 9 * 7 * 3, 3 * 3 * 3 * 5, 2 * 5 * 4 * 5
    for kind in ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"):
        assert found[kind].flop == flop
        assert found[kind].kind == profiled.CONVOLUTIONS[kind]
    assert found["Conv2D"].moved == 4 * (image + kernel + output)


@pytest.mark.skipif(bool(operations.why_not()), reason=operations.why_not())
def test_a_compiled_weight_gradient_has_the_multiplications_of_a_loop(profiled):
    def step(x, dy, kernel):
        return operations.filter_gradient(kernel, x, dy, (2, 2), (0, 0))

    found = costs(profiled, step, (2, 9, 7, 8), (2, 4, 3, 16), (3, 3, 8, 16))["IpucnnFilterGradient"]
    assert found.kind == "convolution, filter gradient"
    assert found.flop == 2 * (2 * 4 * 3 * 16) * (3 * 3 * 8)


def test_a_depthwise_convolution_and_its_gradients_have_the_multiplications_of_a_loop(profiled):
    def step(x, kernel):
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            y = tf.nn.depthwise_conv2d(x, kernel, [1, 1, 1, 1], "SAME")
        return tape.gradient(y, [x, kernel])

    found = costs(profiled, step, (2, 6, 6, 4), (3, 3, 4, 1))
    kinds = [found[name] for name in found if name.startswith("DepthwiseConv")]
    assert len(kinds) == 3
    assert {(c.kind, c.flop) for c in kinds} == {("depthwise", 2.0 * (2 * 6 * 6 * 4) * 9)}


def test_a_product_has_two_operations_for_each_of_its_multiplications(profiled):
    found = costs(profiled, lambda a, b: tf.matmul(a, b, transpose_b=True), (6, 4), (5, 4))
    assert found["MatMul"] == profiled.Cost("matrix product", 2 * 6 * 4 * 5, 4 * (24 + 20 + 30))


def test_kinds_follow_layers_and_shapes(profiled):
    def step(x, weight, gradient):
        with tf.name_scope("block1a_se_reduce"):
            gate = tf.matmul(x, weight)
        with tf.name_scope("block1a_bn"):
            y = tf.square(x)
        return gate, y, tf.exp(x), gradient + weight, tf.sqrt(gradient[:1])

    found = costs(profiled, step, (512, 64), (64, 64), (64, 64), weights=[(64, 64)])
    kinds = {name: found[name].kind for name in ("MatMul", "Square", "AddV2", "Sqrt")}
    assert kinds == {
        "MatMul": "squeeze-excite",
        "Square": "norm and activation",
        "AddV2": "accumulation",
        "Sqrt": "other",
    }


@pytest.mark.parametrize(
    ("name", "in_graph"),
    [
        (
            "while/body/_1/while/while/body/_17/while/while/StatefulPartitionedCall_1/tape/conv/MatMul",
            "tape/conv/MatMul",
        ),
        ("while/body/_1/while/while/body/_17/while/while/AddN", "while/while/AddN"),
        ("StatefulPartitionedCall/conv/MatMul", "conv/MatMul"),
        ("cond/then/_3/conv/MatMul", "conv/MatMul"),
        ("body/conv/MatMul", "body/conv/MatMul"),
    ],
)
def test_traced_names_lose_the_names_of_callers(profiled, name, in_graph):
    assert profiled.CALLERS.sub("", name) == in_graph


def test_operations_of_loops_and_branches_are_found(profiled):
    def loop(x):
        def body(i, x):
            return i + 1, tf.cond(i > 1, lambda: tf.sin(x), lambda: tf.cos(x))

        return tf.while_loop(lambda i, _: i < 3, body, (tf.constant(0), x))[1]

    assert {"Sin", "Cos"} <= set(costs(profiled, loop, (4, 4)))


@pytest.mark.parametrize("kind", ["_FusedConv2D", "_MklNativeFusedConv2D", "_MklFusedConv2D"])
def test_a_fused_operation_counts_as_the_convolution_that_it_begins_with(profiled, kind):
    def convolve(x, kernel, bias):
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), bias))

    specs = [tf.TensorSpec(shape) for shape in ((1, 4, 4, 2), (3, 3, 2, 6), (6,))]
    operations = tf.function(convolve).get_concrete_function(*specs).graph.get_operations()
    (relu,) = (op for op in operations if op.type == "Relu")
    assert profiled.unfused(relu, kind).type == "Conv2D"
    assert profiled.unfused(relu, "_MklRelu").type == "Relu"


def test_a_profile_shows_each_network_once_with_its_batch_norm(profiled):
    cases = profiled.shown_cases()
    assert [c.network for c in cases] == [
        "efficientnet-b0",
        "cifar_resnet8",
        "mobilenetv2",
        "resnet50",
        "unet",
    ]
    assert [(c.micro_batch, c.global_batch) for c in cases[:3]] == [(8, 128), (8, 128), (8, 32)]
