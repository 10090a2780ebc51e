"""The host's order of summation: fused micro-batches are as close to float64 as unfused ones."""

from support.float64 import Reference, distance, on_the_host, samples


def test_fused_is_as_close_to_float64_as_unfused():
    """In three weight updates of cifar_resnet8, no ReLU input is so small that rounding could change its sign."""
    reference = Reference(*samples(3 * 4 * 2, 8, seed=5), batch=2, count=4, rate=0.05)
    exact = reference.run(1)
    assert reference.nearest > 4e-5
    assert distance(reference.run(4), exact) < 1e-12
    unfused, fused = (distance(on_the_host(reference, number), exact) for number in (1, 4))
    assert fused < 2 * unfused and unfused < 1e-6
