"""Plots regret over tuning seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from benchmarks.search import Run

_POINTS = 300
_LEAST, _MOST = 1e-3, 1.0


@contextlib.contextmanager
def drawing(path: Path, panels: int, width: float = 5.2) -> Iterator[Sequence[Any]]:
    """Draw panels side by side and write them to a file at the end."""
    import matplotlib

    matplotlib.use("svg")
    # Make the output reproducible.
    matplotlib.rcParams["svg.hashsalt"] = "autotune"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(width * panels, 4.2), squeeze=False, sharey=True)
    yield axes[0]
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def plot(path: Path, panels: Sequence[tuple[str, Mapping[str, Sequence[Run]]]]) -> None:
    """One panel per surface: the median regret of each sampler, and the range of the middle half of its searches."""
    with drawing(path, len(panels)) as axes:
        for (name, runs), axis in zip(panels, axes, strict=True):
            first = min(r.curve[0][0] for some in runs.values() for r in some if r.curve)
            last = max(r.curve[-1][0] for some in runs.values() for r in some if r.curve)
            seconds = np.geomspace(first, 1.3 * last, _POINTS)
            for sampler, some in runs.items():
                regrets = np.array([[min(r.regret_at(s), _MOST) for s in seconds] for r in some])
                steps = np.quantile(np.maximum(regrets, _LEAST), (0.25, 0.5, 0.75), axis=0)
                # Keep only the points at which a step changes; the others would only make the file larger.
                begins = np.any(np.diff(steps, axis=1) != 0, axis=0)
                kept = np.concatenate([[True], begins[:-1], [True]])
                at, (low, middle, high) = seconds[kept], steps[:, kept]
                (line,) = axis.step(at, middle, where="post", label=sampler, lw=2.4 if sampler == "auto" else 1.4)
                axis.fill_between(at, low, high, step="post", color=line.get_color(), alpha=0.15, lw=0)
            axis.set(xscale="log", yscale="log", xlabel="tuning seconds", title=name, ylim=(_LEAST, _MOST))
            axis.grid(alpha=0.3, which="both", lw=0.4)
        axes[0].set_ylabel("regret of the configuration in hand")
        axes[0].legend(fontsize=8)
