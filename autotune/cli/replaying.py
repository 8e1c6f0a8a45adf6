"""``autotune search --replay SURFACE``: a search without a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from autotune.catalog import find_objective
from autotune.cli.running import asked_to_stop, print_json
from autotune.errors import UsageError
from autotune.records import SCHEMA_VERSION, StudySpec
from autotune.replay import Surface, read_surface
from autotune.scoring import Scorer
from autotune.space import Space, key, spell
from autotune.tuning.replaying import Replayed, narrowed, replay
from autotune.wording import interval_text, rate_text, ratio_text, trial_rate_text


def search_surface(path: Path, spec: StudySpec, given: Mapping[str, object], *, as_json: bool) -> None:
    """Search a surface and print what came of it.

    Args:
        given: what was typed, by option; everything that a surface has decided must be ``None`` or empty.

    Raises:
        AutotuneError: as a real search does.
    """
    decided = [option for option, value in given.items() if value]
    if decided:
        raise UsageError(
            f"{decided[0]} and --replay exclude each other",
            advice="a surface has its own workload, machine and baseline, and a replay leaves no study.",
        )
    surface = read_surface(path)
    space = narrowed(surface.space, spec.fixed, spec.narrowed)
    scorer = Scorer(find_objective(spec.objective))
    try:
        with asked_to_stop() as stop:
            found = replay(
                surface,
                scorer,
                budget_s=spec.budget_s,
                sampler=spec.sampler,
                seed=spec.seed,
                trials=spec.trials,
                by_rate=spec.objective == "throughput",
                space=space,
                stop=stop,
            )
    finally:
        scorer.close()
    if as_json:
        print_json(_as_json(path, surface, space, found))
    else:
        _print(surface, space, found)


def _recorded_best(surface: Surface, space: Space) -> float:
    """The average of the launches of the configuration for which that is the highest."""
    some = (surface.launches.get(key(config), ()) for config in space.grid())
    return max(fmean(r.rate_per_s or 0.0 for r in rows) for rows in some if rows)


def _as_json(path: Path, surface: Surface, space: Space, found: Replayed) -> dict[str, object]:
    best_per_s = _recorded_best(surface, space)
    ratio, low, high = found.speedup
    return {
        "schema_version": SCHEMA_VERSION,
        "replay": str(path),
        "made": surface.heading.made,
        "workload": surface.heading.workload,
        "machine": surface.heading.machine,
        "baseline": {"config": surface.heading.baseline, "samples_per_second": found.baseline_per_s},
        "best": {
            "config": found.winner,
            "samples_per_second": found.rate_per_s,
            "speedup": ratio,
            "speedup_ci95": [low, high],
        },
        "recorded_best_samples_per_second": best_per_s,
        "trials": dict(Counter(s.trial.result.status.value for s in found.steps)),
        "searched_s": found.searched_s,
        "elapsed_s": found.elapsed_s,
        "stopped": found.stopped,
    }


def _print(surface: Surface, space: Space, found: Replayed) -> None:
    console = Console(highlight=False)
    h = surface.heading
    console.print(f"{h.workload}, {h.made} on {h.machine}; virtual time", markup=False)
    table = Table("trial", "at", "status", "samples/s", "", box=None, pad_edge=False)
    baseline = h.baseline
    for step in found.steps:
        trial = step.trial
        changed = " ".join(f"{n}={spell(v)}" for n, v in trial.config.items() if baseline.get(n) != v)
        table.add_row(
            str(trial.number),
            f"{step.ended_s:.0f} s",
            trial.result.status.value,
            trial_rate_text(trial),
            changed or "the baseline",
        )
    console.print(table)
    console.print(f"{found.stopped[:1].upper()}{found.stopped[1:]}.", markup=False)
    ratio, low, high = found.speedup
    changed = ", ".join(f"{n}={spell(v)}" for n, v in found.winner.items() if baseline.get(n) != v)
    best_per_s = _recorded_best(surface, space)
    interval = f" ({interval_text((low, high))})" if found.launches else ""
    times = f"{ratio_text(ratio, (low, high))}{interval} the baseline's {rate_text(found.baseline_per_s)}"
    raced_s = found.elapsed_s - found.searched_s
    for line in (
        f"Found {rate_text(found.rate_per_s)} samples/s, {times}, with {changed or 'the baseline itself'}.",
        f"That took {found.searched_s:.0f} s of searching and {raced_s:.0f} s of launching the best again in turns.",
        f"The fastest that was recorded ran at {rate_text(best_per_s)} samples/s, the average of its launches.",
    ):
        console.print(line, markup=False)
