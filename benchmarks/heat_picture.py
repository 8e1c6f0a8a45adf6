"""Draws a picture of a heat: who took how many turns, and what is known of each.

python -m benchmarks.heat_picture studies/resnet18-1 docs/heat.svg [--heat 1]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autotune.base.layout import StudyFiles
from autotune.base.records import HeatEntrant, StudyHeat, TrialStatus
from autotune.space.formatting import describe
from autotune.study.tables import read_heats, read_trials
from benchmarks.curves import drawing


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("study", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--heat", type=int, default=1)
    options = parser.parse_args()
    files = StudyFiles(options.study)
    heat = next(h for h in read_heats(files) if h.number == options.heat)
    baseline = read_trials(files)[0].config
    ranked = sorted((e for e in heat.heat.entrants if e.ratio is not None), key=lambda e: e.ratio or 0.0)
    with drawing(options.picture, 1, width=7.2) as (axis,):
        for place, entrant in enumerate(ranked):
            _draw(axis, place, entrant, heat)
        names = [describe(e.config, baseline) for e in ranked]
        axis.set_yticks(range(len(ranked)), names, fontsize=6)
        axis.axvline(1.0, color="0.6", lw=0.8, zorder=0)
        axis.set(xlim=(0, None))
        axis.set_xlabel("rate relative to the reference (95 %), and the turns that it took", fontsize=7)
        axis.tick_params(axis="x", labelsize=7)
        axis.grid(axis="x", alpha=0.3, lw=0.4)
        axis.figure.set_size_inches(7.2, 0.6 + 0.21 * len(ranked))


def _draw(axis: Any, place: int, entrant: HeatEntrant, heat: StudyHeat) -> None:
    low, high = entrant.ratio_ci95 or (entrant.ratio, entrant.ratio)
    going_on = entrant.status is TrialStatus.COMPLETE
    colour = "black" if entrant is heat.heat.reference else "tab:orange" if going_on else "0.55"
    axis.plot([low, high], [place, place], color=colour, lw=2.0, solid_capstyle="butt")
    axis.plot(entrant.ratio, place, "o", color=colour, ms=4)
    turns = sum(turn is not None for turn in entrant.turns)
    axis.annotate(f" {turns}", (high, place), fontsize=6, va="center", color=colour)


if __name__ == "__main__":
    main()
