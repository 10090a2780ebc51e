"""The host's order of summation: as near to float64 fused as unfused, and what the rare larger distances are."""

import numpy as np
import pytest
from float64_network import Reference, decided_otherwise, distance, on_the_host, samples


def test_fused_is_as_near_to_float64_as_unfused():
    """Three weight updates of cifar_resnet8 in which no ReLU is given a number that rounding could bring past 0."""
    reference = Reference(*samples(3 * 4 * 2, 8, seed=5), batch=2, count=4, rate=0.05)
    exact = reference.run(1, near=4e-5)
    assert not reference.nearest
    assert distance(reference.run(4), exact)[0] < 1e-12
    unfused, fused = (distance(on_the_host(reference, number), exact)[0] for number in (1, 4))
    assert fused < 2 * unfused and unfused < 1e-6


@pytest.mark.slow
def test_what_is_farther_is_a_relu_that_decides_otherwise():
    """With the same decisions float64 comes to the same weights, in either order."""
    reference = Reference(*samples(3 * 8 * 4, 16, seed=0), batch=4, count=8, rate=0.1)
    exact = reference.run(1)
    for number in (1, 8):
        found = on_the_host(reference, number)
        flips = decided_otherwise(reference, found, near=2e-6)
        assert distance(found, reference.run(1, flips=flips))[0] < 2e-6
        assert bool(flips) == (distance(found, exact)[0] > 1e-5)


def test_a_flipped_decision_is_found():
    """A ReLU that passes what it should not moves weights by far more than rounding does."""
    reference = Reference(*samples(2 * 2, 8, seed=1), batch=2, count=1, rate=0.05)
    exact = reference.run(1, near=1e-4)
    value, place = min(reference.nearest, key=lambda item: abs(item[0]))
    moved = reference.run(1, flips=[place])
    assert distance(moved, exact)[0] > 1e-6 and np.isfinite(distance(moved, exact)[0])
    assert decided_otherwise(reference, moved, near=abs(value) * 1.01) == [place]
