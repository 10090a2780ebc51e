"""Places labels beside points so that they overlap neither each other nor points: greedy, then a few repairs."""

from typing import Any, List, Sequence, Tuple

import numpy as np

Box = Tuple[float, float, float, float]
_DIRECTIONS = 24
_RINGS = (0.0, 5.0, 11.0, 18.0, 27.0, 38.0, 52.0, 70.0, 95.0)
_PASSES = 4
# Of overlapping another label, a point, and leaving the frame, per unit of area; a unit of distance costs 1.
_LABEL, _POINT, _OUTSIDE = 20.0, 8.0, 50.0
# Of being nearer to another point than to its own, per pixel up to so many.
_FOREIGN, _FOREIGN_PIXELS = 12.0, 12.0


def place_labels(
    points: Sequence[Tuple[float, float]],
    sizes: Sequence[Tuple[float, float]],
    frame: Box,
    radius: float = 4.0,
    obstacles: Sequence[Box] = (),
) -> List[Box]:
    """Where each label goes.

    Args:
        points: centres, in pixels.
        sizes: width and height of each point's label.
        frame: left, bottom, right, top that labels should stay in.
        radius: of the points' marks.
        obstacles: further boxes that labels must not cover.

    Returns:
        Left, bottom, right, top of each label, in the order of the points; the same for the same input.
    """
    if not points:
        return []
    centres: Any = np.asarray(points, float)
    marks = np.concatenate([centres - radius, centres + radius], axis=1)
    if obstacles:
        marks = np.concatenate([marks, np.asarray(obstacles, float)])
    candidates = [_candidates(centre, size, radius) for centre, size in zip(centres, sizes)]
    fixed = [
        distance
        + _POINT * _overlap(boxes, marks).sum(axis=1)
        + _OUTSIDE * _outside(boxes, frame)
        + _FOREIGN * _foreign(boxes, centres, i)
        for i, (boxes, distance) in enumerate(candidates)
    ]
    # Those with many neighbours choose first.
    near = (np.abs(centres[:, None] - centres[None]) < [[[90.0, 30.0]]]).all(axis=2).sum(axis=1)
    order = np.argsort(-near, kind="stable")
    placed = np.full((len(centres), 4), np.nan)
    for _ in range(_PASSES):
        before = placed.copy()
        for i in order:
            boxes, _distance = candidates[i]
            others = np.delete(placed, i, axis=0)
            others = others[~np.isnan(others[:, 0])]
            costs = fixed[i] + _LABEL * _overlap(boxes, others).sum(axis=1)
            placed[i] = boxes[int(np.argmin(costs))]
        if np.array_equal(before, placed):
            break
    return [(float(a), float(b), float(c), float(d)) for a, b, c, d in placed]


def overlap_area(first: Box, second: Box) -> float:
    """Area that two boxes share."""
    return float(_overlap(np.asarray([first]), np.asarray([second]))[0, 0])


def _candidates(centre: Any, size: Tuple[float, float], radius: float) -> Tuple[Any, Any]:
    """Boxes around a point, and what their distance costs."""
    width, height = size
    boxes, costs = [], []
    for ring in _RINGS:
        for k in range(_DIRECTIONS):
            angle = 2 * np.pi * k / _DIRECTIONS
            x, y = np.cos(angle), np.sin(angle)
            reach = radius + 2.0 + ring
            # The nearest corner or edge of the label lies on the ring.
            left = centre[0] + reach * x + (-width if x < -0.3 else 0.0 if x > 0.3 else -width / 2)
            bottom = centre[1] + reach * y + (-height if y < -0.3 else 0.0 if y > 0.3 else -height / 2)
            boxes.append((left, bottom, left + width, bottom + height))
            # Right of the point reads best.
            costs.append(3.0 * ring + 4.0 * (1.0 - x))
    return np.asarray(boxes), np.asarray(costs)


def _foreign(boxes: Any, centres: Any, own: int) -> Any:
    """How much nearer than its own point, and four pixels more, the nearest other point is to each box."""
    if len(centres) == 1:
        return np.zeros(len(boxes))
    low, high = boxes[:, None, :2], boxes[:, None, 2:]
    distances = np.linalg.norm(centres[None] - np.clip(centres[None], low, high), axis=2)
    others = np.delete(distances, own, axis=1).min(axis=1)
    return np.clip(distances[:, own] + 4.0 - others, 0.0, _FOREIGN_PIXELS)


def _overlap(boxes: Any, others: Any) -> Any:
    """Shared area of each box with each other one."""
    if not len(others):
        return np.zeros((len(boxes), 1))
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    return np.clip(high - low, 0, None).prod(axis=2)


def _outside(boxes: Any, frame: Box) -> Any:
    """How far each box sticks out."""
    left, bottom, right, top = frame
    out = np.clip([left - boxes[:, 0], bottom - boxes[:, 1], boxes[:, 2] - right, boxes[:, 3] - top], 0, None)
    return out.sum(axis=0)
