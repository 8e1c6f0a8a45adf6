"""``autotune search --replay SURFACE``: a search on recorded launches, without a device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from autotune.cli.output import print_json
from autotune.cli.running import stop_signals
from autotune.errors import UsageError
from autotune.formatting import interval_text, rate_text, ratio_text, trial_rate_text
from autotune.knobs import spell
from autotune.records import StudySpec, Value
from autotune.replay import Surface, read_surface
from autotune.replay.run import Replayed, recorded_best, replay_request, replayed_json
from autotune.space import Space
from autotune.study.options import OPTIONS


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
    console = Console(highlight=False)
    h = surface.heading
    console.print(f"{h.workload}, {h.made} on {h.machine}; virtual time", markup=False)
    trials = Table("trial", "at", "status", "samples/s", Column("", overflow="fold"), box=None, pad_edge=False)
    for step in found.steps:
        trial = step.trial
        trials.add_row(
            str(trial.number),
            f"{step.ended_s:.0f} s",
            trial.result.status.value,
            trial_rate_text(trial),
            _changed(trial.config, h.baseline),
        )
    console.print(trials)
    console.print(f"{found.stopped[:1].upper()}{found.stopped[1:]}.", markup=False)
    if found.finalists:
        again = Table("launched again", "times", "samples/s", "the baseline's", box=None, pad_edge=False)
        for one in found.finalists:
            again.add_row(
                "the baseline" if one.trial == found.baseline.trial else f"trial {one.trial}",
                str(one.launches),
                rate_text(one.samples_per_second, one.ci95),
                f"{ratio_text(one.speedup, one.speedup_ci95)} ({interval_text(one.speedup_ci95)})",
            )
        console.print(again)
    console.print(f"{found.raced[:1].upper()}{found.raced[1:]}.", markup=False)
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
        console.print(line, markup=False)


def _changed(config: Mapping[str, Value], baseline: Mapping[str, Value]) -> str:
    changed = [f"{n}={spell(v)}" for n, v in config.items() if baseline.get(n) != v]
    return " ".join(changed) or "the baseline itself"
