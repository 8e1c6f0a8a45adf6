"""A thousand cards and two hundred trainings for a week, in virtual time: with and without coordinated searches.

    python -m benchmarks.fleet [--markdown FILE] [--seeds 20] [--preemption 30m] …     (every assumption is an option)

Searches take the launches of searches that are replayed on recorded surfaces (`benchmarks/recorded/`), and give what
those found; everything else is assumed, and printed. A training is a kind of run that is started again and again; each
run has one card and goes on from its last checkpoint after a preemption, on whatever kind of card is free. A preempted
search repeats the launch that was cut off, or everything, if studies are not resumed.

The makespan is the time until all runs have ended; they are all submitted at the beginning.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean, median, stdev

from autotune.base.parsing import duration_s, duration_text
from autotune.stats.rate import t_quantile
from benchmarks.fleet_limits import limits
from benchmarks.fleet_week import HOUR_S, POLICIES, SURFACES, Assumptions, Fleet, Library, replayed
from benchmarks.tables import ResultTable


def with_interval(values: Sequence[float], form: str) -> str:
    """Return the mean with its 95 % interval (Student's t over seeds)."""
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{fmean(values):{form}} ± {half:{form}}"


def library_of(paths: Sequence[Path], asked: Assumptions, replays: int) -> Library:
    """Return replayed searches, by surface."""
    return {path.stem: [replayed(path, seed, asked) for seed in range(replays)] for path in paths}


def table(asked: Assumptions, library: Library, seeds: int) -> ResultTable:
    """Simulate all policies."""
    number = sum(cards for _, cards, _ in asked.cards)
    found = ResultTable(
        f"A week of {number:,} cards and {asked.trainings} trainings, in virtual time",
        (
            *("who searches", "makespan, h", "of nobody's", "searching, card h", "of it lost"),
            *("training lost, card h", "searches", "fresh after a week"),
        ),
    )
    alone_s: list[float] = []
    for policy in POLICIES:
        weeks = [Fleet(asked, policy, library, seed).week() for seed in range(seeds)]
        alone_s = alone_s or [week.makespan_s for week in weeks]
        found.add(
            policy.name,
            with_interval([week.makespan_s / HOUR_S for week in weeks], ".1f"),
            with_interval([week.makespan_s / s for week, s in zip(weeks, alone_s, strict=True)], ".3f"),
            with_interval([week.searching_s / HOUR_S for week in weeks], ".1f"),
            with_interval([week.lost_search_s / HOUR_S for week in weeks], ".2f"),
            with_interval([week.lost_training_s / HOUR_S for week in weeks], ".0f"),
            with_interval([week.searches for week in weeks], ".0f"),
            with_interval([100 * week.fresh for week in weeks], ".0f") + " %",
        )
    for surface, searches in library.items():
        seconds = [sum(search.launches) for search in searches]
        found.notes.append(
            f"{surface}: {len(searches)} replayed searches of {min(seconds):.0f} to {max(seconds):.0f} s in "
            f"{median(len(search.launches) for search in searches):.0f} launches (median), speedup "
            f"{min(s.speedup for s in searches):.2f} to {max(s.speedup for s in searches):.2f}."
        )
    found.notes.append(
        f"Means over {seeds} seeds, ± half of the 95 % interval (t). Lost: repeated because of preemptions, imports "
        "and probes of resumed searches included. Fresh: of all pairs of training and kind of card. A run that "
        "searches for itself does so on each kind of card that it comes to."
    )
    found.notes.append("Assumed: " + "; ".join(_told(asked, one.name, one.metadata["help"]) for one in fields(asked)))
    found.notes.append(
        "Built in: a preempted run goes behind all that wait; a search takes the same seconds on all kinds of cards; a "
        "stale profile costs a part of its gain only where one search serves all, not runs that search for themselves."
    )
    return found


def _told(asked: Assumptions, name: str, what: str) -> str:
    value = getattr(asked, name)
    text = duration_text(value) if _is_duration(name) else str(value)
    return f"{what} (--{name.replace('_', '-')} {text})"


def _is_duration(name: str) -> bool:
    return name in ("length", "preemption", "requeue", "start", "search_start", "checkpoint")


def assumed(options: argparse.Namespace) -> Assumptions:
    """Return the assumptions of a command line."""
    return replace(Assumptions(), **{one.name: getattr(options, one.name) for one in fields(Assumptions)})


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate a fleet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--markdown", type=Path, default=None)
    parser.add_argument("--surfaces", type=Path, nargs="+", default=SURFACES, metavar="SURFACE")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--replays", type=int, default=4, help="replayed searches of each surface")
    for one in fields(Assumptions):
        flag, default, what = f"--{one.name.replace('_', '-')}", one.default, one.metadata["help"]
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", help=what)
        else:
            kind = duration_s if _is_duration(one.name) else type(default)
            parser.add_argument(flag, type=kind, default=default, help=what)
    options = parser.parse_args(arguments)
    asked = assumed(options)
    library = library_of(options.surfaces, asked, options.replays)
    found = table(asked, library, options.seeds)
    found.show(options.markdown)
    further = limits(asked, library)
    further.show(None)
    if options.markdown is not None:
        with options.markdown.open("a") as stream:
            stream.write("\n" + further.as_markdown().replace("# ", "## ", 1))


if __name__ == "__main__":
    main()
