"""The host's order of summation: as near to float64 fused as unfused."""

from support.float64 import Reference, distance, on_the_host, samples


def test_fused_is_as_near_to_float64_as_unfused():
    """Three weight updates of cifar_resnet8 in which no ReLU is given a number that rounding could bring past 0."""
    reference = Reference(*samples(3 * 4 * 2, 8, seed=5), batch=2, count=4, rate=0.05)
    exact = reference.run(1)
    assert reference.nearest > 4e-5
    assert distance(reference.run(4), exact) < 1e-12
    unfused, fused = (distance(on_the_host(reference, number), exact) for number in (1, 4))
    assert fused < 2 * unfused and unfused < 1e-6
