"""V^Rand and V^Info of the ISBI 2012 challenge against loops over contingencies, and their properties."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipucnn.training.segment_scores import (
    THRESHOLDS,
    SegmentScores,
    information,
    overlaps,
    pairs,
    segment_pixels,
    thinned_components,
)


def naive_components(mask):
    """Flood-fills over 4 neighbours, in plain Python."""
    height, width = mask.shape
    labels = np.zeros(mask.shape, int)
    count = 0
    for start in zip(*np.nonzero(mask)):
        if labels[start]:
            continue
        count += 1
        waiting = [start]
        labels[start] = count
        while waiting:
            row, column = waiting.pop()
            for r, c in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
                if 0 <= r < height and 0 <= c < width and mask[r, c] and not labels[r, c]:
                    labels[r, c] = count
                    waiting.append((r, c))
    return labels


def neighbours(pixel):
    """Returns the pixels left, above, right and below of (column, row)."""
    x, y = pixel
    return [(x - 1, y), (x, y - 1), (x + 1, y), (x, y + 1)]


def naive_watershed(heights):
    """Floods an image of any heights as Vincent and Soille, pixels column by column; {pixel: basin or 0}."""
    basin_of, basins = {}, 0
    for height in sorted(set(heights.values())):
        level = sorted(pixel for pixel in heights if heights[pixel] == height)
        basin_of.update(dict.fromkeys(level, "dry"))
        flooded = [p for p in level if any(isinstance(basin_of.get(n), int) for n in neighbours(p))]
        basin_of.update(dict.fromkeys(flooded, "waiting"))
        while flooded:
            pixel = flooded.pop(0)
            for n in neighbours(pixel):
                if basin_of.get(n) == "dry":
                    basin_of[n] = "waiting"
                    flooded.append(n)
            around = {basin_of[n] for n in neighbours(pixel) if isinstance(basin_of.get(n), int)} - {0}
            basin_of[pixel] = around.pop() if len(around) == 1 else 0
        for pixel in level:  # pixels that no water has reached become a new basin
            if basin_of[pixel] == "dry":
                basins += 1
                reached = [pixel]
                while reached:
                    one = reached.pop()
                    basin_of[one] = basins
                    reached += [n for n in neighbours(one) if basin_of.get(n) == "dry"]
    return basin_of


def naive_thinned(mask):
    """Returns components of the watershed of a mask in which cells lie below membranes."""
    heights = {(x, y): 0 if cell else 255 for (y, x), cell in np.ndenumerate(mask)}
    basin_of = naive_watershed(heights)
    return np.array([[basin_of[x, y] for x in range(mask.shape[1])] for y in range(mask.shape[0])])


def naive_scores(predicted, truth, components=naive_components):
    """Returns (Rand split, merge, score), (information split, merge, score): the paper's sums over p_ij, s_i, t_j."""
    t, s = naive_components(truth), components(predicted)
    joint, alone = Counter(), 0
    for row in range(truth.shape[0]):
        for column in range(truth.shape[1]):
            if t[row, column]:
                cell_term = s[row, column]
                if not cell_term:
                    alone += 1
                    cell_term = -alone
                joint[cell_term, t[row, column]] += 1
    n = sum(joint.values())
    in_s, in_t = Counter(), Counter()
    for (i, j), count in joint.items():
        in_s[i] += count
        in_t[j] += count
    squares = [sum((count / n) ** 2 for count in counter.values()) for counter in (joint, in_t, in_s)]
    rand = squares[0] / squares[1], squares[0] / squares[2], 2 * squares[0] / (squares[1] + squares[2])
    h_s, h_t = (-sum(c / n * math.log(c / n) for c in counter.values()) for counter in (in_s, in_t))
    shared = sum(c / n * math.log(c * n / (in_s[i] * in_t[j])) for (i, j), c in joint.items())
    split = shared / h_s if h_s else 1.0
    merge = shared / h_t if h_t else 1.0
    score = 2 * shared / (h_s + h_t) if h_s + h_t else 1.0
    return rand, (split, merge, score)


def scores(predicted, truth, thin=False):
    counts = overlaps(*segment_pixels(np.asarray(predicted, bool), np.asarray(truth, bool), thin))
    both, in_true, in_predicted = pairs(counts)
    return (both / in_true, both / in_predicted, 2 * both / (in_true + in_predicted)), information(counts)


def masks(text):
    return np.array([[letter == "#" for letter in line] for line in text.split()])


@st.composite
def two_masks(draw):
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    bits = st.lists(st.integers(0, 3), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])
    predicted, truth = (np.reshape(draw(bits), shape) > 0 for _ in range(2))
    truth[0, 0] = True
    return predicted, truth


@settings(max_examples=60)
@given(two_masks())
def test_scores_equal_the_sums_of_the_paper(pair):
    for got, expected in zip(scores(*pair), naive_scores(*pair)):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=60)
@given(two_masks())
def test_scores_after_thinning_are_those_of_the_watershed(pair):
    predicted = pair[0]
    thinned, expected = thinned_components(predicted), naive_thinned(predicted)
    assert ((thinned > 0) == (expected > 0)).all()
    # The same components under any numbers
    assert len(set(zip(thinned.flat, expected.flat))) == len(set(expected.flat)) == len(set(thinned.flat))
    for got, naive in zip(scores(*pair, thin=True), naive_scores(*pair, components=naive_thinned)):
        np.testing.assert_allclose(got, naive, rtol=1e-9, atol=1e-9)


def test_a_wide_membrane_becomes_a_line():
    lines = {
        "#...# #...#": "11022 11022",  # a line in the middle
        "#....# #....#": "111022 111022",  # of the two middle pixels, the one reached second
        "#.. ... ...": "111 111 111",
        "... ...": "111 111",  # no cell: one component
        "#.#.# ..... #.#.#": "10203 00000 40506",  # a dam of one pixel is unchanged
    }
    for text, expected in lines.items():
        components = thinned_components(masks(text))
        assert [" ".join("".join(map(str, row)) for row in components)] == [expected]
    truth = masks("##.## ##.## ##.##")
    wide = masks("#...# #...# #...#")
    assert scores(wide, truth)[0][2] < 1 and scores(wide, truth, thin=True)[0] == pytest.approx((1, 1, 1))


def test_merged_and_split_cells():
    two = masks("##.## ##.##")
    one = masks("##### #####")
    rand, info = scores(one, two)  # 8 pixels in two cells of 4, predicted as one
    assert rand == pytest.approx((1.0, 0.5, 2 / 3)) and info == pytest.approx((1.0, 0.0, 0.0))
    rand, info = scores(two, one)  # one cell of 10, predicted as two of 4 and two single pixels
    assert rand == pytest.approx((34 / 100, 1.0, 68 / 134)) and info[0] == pytest.approx(0)
    diagonal = masks("#. .#")  # 4 neighbours: two cells
    assert len(set(segment_pixels(diagonal, diagonal)[0])) == 2
    rand, _ = scores(masks("... ..."), masks("### ###"))  # no cell: each pixel on its own
    assert rand == pytest.approx((6 / 36, 1.0, 12 / 42))


@pytest.mark.parametrize("thin", [False, True])
def test_pairs_add_up_over_images_and_information_is_a_mean(thin):
    random = np.random.RandomState(0)
    totals, rand, info = SegmentScores(), [], []
    ending = "_thinned" if thin else ""
    for _ in range(3):
        truth = random.uniform(size=(12, 15)) > 0.3
        cell = np.clip(truth * 0.6 + random.uniform(0, 0.5, truth.shape), 0, 1)
        image_scores = totals.add(cell, truth.astype(np.uint8))
        at = [scores(cell > threshold, truth, thin) for threshold in THRESHOLDS]
        assert image_scores["rand" + ending] == pytest.approx(at[5][0][2])
        assert image_scores["info" + ending] == pytest.approx(at[5][1][2])
        counts = [overlaps(*segment_pixels(cell > threshold, truth, thin)) for threshold in THRESHOLDS]
        rand.append([pairs(one) for one in counts])
        info.append([one for _, one in at])
    assert totals.add(cell, np.zeros(truth.shape)) is None
    result = totals.result()
    both, in_true, in_predicted = np.sum(rand, axis=0).T
    pooled = np.transpose([both / in_true, both / in_predicted, 2 * both / (in_true + in_predicted)])
    for name, values in (("rand", pooled), ("info", np.mean(info, axis=0))):
        total, best = result[name + ending], int(values[:, 2].argmax())
        for key, column in (("split", 0), ("merge", 1), ("score", 2)):
            assert total[key] == pytest.approx(values[5, column])
            assert total["best"][key] == pytest.approx(values[best, column])
        assert total["best"]["threshold"] == THRESHOLDS[best]
    assert SegmentScores().result() is None
