"""``autotune search --replay SURFACE``: a search on recorded launches, without a device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from rich.table import Column

from autotune.base.errors import UsageError
from autotune.base.records import StudySpec, Value
from autotune.cli.output import print_json, print_rich, stop_signals
from autotune.knobs import spell
from autotune.report.document import FittingTable, Line
from autotune.search.replay import Surface, read_surface
from autotune.search.replay.run import Replayed, recorded_best, replay_request, replayed_json
from autotune.space import Space
from autotune.space.formatting import interval_text, rate_text, ratio_text, trial_rate_text
from autotune.study.request import OPTIONS


def refuse_beside_replay(typed: Mapping[str, object], *, names: Collection[str] = ()) -> None:
    """Refuse options whose value is fixed by the surface.

    Args:
        typed: option values of the command line, by the names of `search`'s options.
        names: names of options to allow nevertheless.

    Raises:
        UsageError: such an option is given.
    """
    for option in OPTIONS:
        if option.recorded and option.name not in names and option.asked(typed[option.name]):
            raise UsageError(
                f"{option.flag} and --replay exclude each other",
                advice="a surface has its own workload, machine and baseline, and a replay leaves no study.",
            )


def search_surface(path: Path, spec: StudySpec, typed: Mapping[str, object], *, as_json: bool) -> None:
    """Search a surface and print the result.

    Args:
        typed: option values of the command line, by the names of `search`'s options.

    Raises:
        AutotuneError: as in a real search.
    """
    refuse_beside_replay(typed)
    surface = read_surface(path)
    with stop_signals() as stop:
        space, found = replay_request(surface, spec, stop=stop)
    if as_json:
        print_json(replayed_json(path, surface, space, found))
    else:
        _print(surface, space, found)


def _print(surface: Surface, space: Space, found: Replayed) -> None:
    h = surface.heading
    print_rich(Line(f"{h.workload}, {h.made} on {h.machine}; virtual time"))
    figures = [Column(name, no_wrap=True) for name in ("trial", "at", "status", "samples/s")]
    trials = FittingTable(*figures, Column("", overflow="fold"), box=None, pad_edge=False)
    for step in found.steps:
        trial = step.trial
        trials.add_row(
            str(trial.number),
            f"{step.ended_s:.0f} s",
            trial.result.status.value,
            trial_rate_text(trial),
            _changed(trial.config, h.baseline),
        )
    print_rich(trials)
    print_rich(Line(f"{found.stopped[:1].upper()}{found.stopped[1:]}."))
    if found.finalists:
        names = ("launched again", "times", "samples/s", "the baseline's")
        again = FittingTable(*(Column(name, no_wrap=True) for name in names), box=None, pad_edge=False)
        for one in found.finalists:
            again.add_row(
                "the baseline" if one.trial == found.baseline.trial else f"trial {one.trial}",
                str(one.launches),
                rate_text(one.samples_per_second, one.ci95),
                f"{ratio_text(one.speedup, one.speedup_ci95)} ({interval_text(one.speedup_ci95)})",
            )
        print_rich(again)
    print_rich(Line(f"{found.raced[:1].upper()}{found.raced[1:]}."))
    best = found.best
    interval = f" ({interval_text(best.speedup_ci95)})" if best.verified else ""
    times = f"{ratio_text(best.speedup, best.speedup_ci95)}{interval} the baseline's"
    raced_s = found.elapsed_s - found.searched_s
    for line in (
        f"Found {rate_text(best.samples_per_second)} samples/s, {times} "
        f"{rate_text(found.baseline.samples_per_second)}, with {_changed(best.config, h.baseline)}.",
        f"That took {found.searched_s:.0f} s of searching and {raced_s:.0f} s of launching the best again in turns.",
        f"The fastest that was recorded ran at {rate_text(recorded_best(surface, space))} samples/s, the average of "
        "its launches.",
    ):
        print_rich(Line(line))


def _changed(config: Mapping[str, Value], baseline: Mapping[str, Value]) -> str:
    changed = [f"{n}={spell(v)}" for n, v in config.items() if baseline.get(n) != v]
    return " ".join(changed) or "the baseline itself"
