"""Pictures of worlds whose things are round."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np


class Disc(NamedTuple):
    """Something round in a picture."""

    x: float
    y: float
    radius: float
    color: Any  # as matplotlib takes it
    alpha: float
    name: str


def draw_discs(
    pictures: Iterable[Iterable[Disc]], limits: tuple[float, float, float, float]
) -> Iterator[np.ndarray]:
    """Yields an image (400, 400, 3), uint8, of each picture; limits are left, right, low, high."""
    from matplotlib import pyplot as plt
    from matplotlib.patches import Circle

    figure, axes = plt.subplots(figsize=(4.0, 4.0), layout="constrained")
    canvas: Any = figure.canvas
    try:
        for step, discs in enumerate(pictures):
            axes.clear()
            axes.set(xlim=limits[:2], ylim=limits[2:], aspect="equal", xticks=[], yticks=[])
            axes.set_title(f"step {step}")
            for disc in discs:
                center, corner = (disc.x, disc.y), (disc.x + disc.radius, disc.y + disc.radius)
                axes.add_patch(Circle(center, disc.radius, color=disc.color, alpha=disc.alpha))
                if disc.name:
                    axes.text(
                        *corner, disc.name, fontsize="x-small", color=disc.color, clip_on=True
                    )
            canvas.draw()
            yield np.array(canvas.buffer_rgba())[..., :3]
    finally:
        plt.close(figure)
