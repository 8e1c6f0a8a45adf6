"""`autotune search`."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.base.errors import UsageError
from autotune.base.layout import StudyFiles
from autotune.base.observer import Observer
from autotune.base.records import SCHEMA_VERSION, Outcome, StudySpec, Trial, Value
from autotune.base.tracking import TrackedRun, Tracker, Tracking, check
from autotune.cli.options import Command, Json, NoInput, Track, make_spec, search_options
from autotune.cli.output import end_search, environment, plain_table, print_json, print_rich, stop_signals
from autotune.knobs import spell
from autotune.report.document import Line
from autotune.search import DryRun, preview
from autotune.search import search as search_study
from autotune.search.replay import Surface, read_surface
from autotune.search.replay.run import Replayed, recorded_best, replay_request, replayed_json
from autotune.space import Space
from autotune.space.formatting import interval_text, rate_text, ratio_text, settings, trial_rate_text
from autotune.study.request import OPTIONS

# ``autotune search --replay SURFACE``: a search on recorded launches, without a device.


def refuse_beside_replay(typed: Mapping[str, object], *, names: Collection[str] = ()) -> None:
    """Refuse options whose value is fixed by the surface.

    Args:
        typed: option values of the command line, by the names of `search`'s options.
        names: options to allow nevertheless.
    """
    for option in OPTIONS:
        if option.recorded and option.name not in names and option.asked(typed[option.name]):
            raise UsageError(
                f"{option.flag} and --replay exclude each other",
                advice="a surface has its own workload, machine and baseline, and a replay leaves no study.",
            )


def search_surface(path: Path, spec: StudySpec, typed: Mapping[str, object], *, as_json: bool) -> None:
    """Search a surface and print the result."""
    refuse_beside_replay(typed)
    surface = read_surface(path)
    with stop_signals() as stop:
        space, replayed = replay_request(surface, spec, stop=stop)
    if as_json:
        print_json(replayed_json(path, surface, space, replayed))
    else:
        _print_replay(surface, space, replayed)


def _print_replay(surface: Surface, space: Space, found: Replayed) -> None:
    heading = surface.heading
    print_rich(Line(f"{heading.workload}, {heading.made} on {heading.machine}; virtual time"))
    trials = plain_table("trial", "at", "status", "samples/s", "", wrap=("",))
    for step in found.steps:
        trial = step.trial
        trials.add_row(
            str(trial.number),
            f"{step.ended_s:.0f} s",
            trial.result.status.value,
            trial_rate_text(trial),
            _changed(trial.config, heading.baseline),
        )
    print_rich(trials)
    print_rich(Line(f"{found.stopped[:1].upper()}{found.stopped[1:]}."))
    if found.finalists:
        again = plain_table("launched again", "times", "samples/s", "the baseline's")
        for finalist in found.finalists:
            again.add_row(
                "the baseline" if finalist.trial == found.baseline.trial else f"trial {finalist.trial}",
                str(finalist.launches),
                rate_text(finalist.samples_per_second, finalist.ci95),
                f"{ratio_text(finalist.speedup, finalist.speedup_ci95)} ({interval_text(finalist.speedup_ci95)})",
            )
        print_rich(again)
    print_rich(Line(f"{found.raced[:1].upper()}{found.raced[1:]}."))
    best = found.best
    interval = f" ({interval_text(best.speedup_ci95)})" if best.verified else ""
    times = f"{ratio_text(best.speedup, best.speedup_ci95)}{interval} the baseline's"
    raced_s = found.elapsed_s - found.searched_s
    for line in (
        f"Found {rate_text(best.samples_per_second)} samples/s, {times} "
        f"{rate_text(found.baseline.samples_per_second)}, with {_changed(best.config, heading.baseline)}.",
        f"That took {found.searched_s:.0f} s of searching and {raced_s:.0f} s of launching the best again in turns.",
        f"The fastest that was recorded ran at {rate_text(recorded_best(surface, space))} samples/s, the average of "
        "its launches.",
    ):
        print_rich(Line(line))


def _changed(config: Mapping[str, Value], baseline: Mapping[str, Value]) -> str:
    changed = [f"{n}={spell(v)}" for n, v in config.items() if baseline.get(n) != v]
    return " ".join(changed) or "the baseline itself"


class TrackedSearch(Observer):
    """Forwards a search's events to its observer, and reports trials and the outcome to trackers.

    Attributes:
        tracking: the run in the trackers, which the caller ends.
    """

    def __init__(self, observer: Observer, trackers: Sequence[type[Tracker]], studies: Path) -> None:
        self._observer = observer
        self._studies = studies
        self._spec: StudySpec | None = None
        self.tracking = Tracking(trackers, self._run, observer.says)

    def event(self, name: str, *values: Any) -> None:
        getattr(self._observer, name)(*values)

    def begins(self, spec: StudySpec, headline: str) -> None:
        self._spec = spec
        super().begins(spec, headline)

    def trial_ends(self, trial: Trial) -> None:
        super().trial_ends(trial)
        self.tracking.log(trial.number, {"samples_per_second": trial.rate_per_s, "score": trial.score})
        text = f"{trial.result.status}: {settings(trial.config)}"
        self.tracking.tell(trial.number, f"trial/{trial.number:05d}", text)

    def concludes(self, outcome: Outcome) -> None:
        """Report the outcome of the finished search."""
        best, step = outcome.best, sum(outcome.trials.values())
        rates = {"best_samples_per_second": best.samples_per_second, "speedup": best.speedup}
        self.tracking.log(step, {**rates, "baseline_samples_per_second": outcome.baseline.samples_per_second})
        self.tracking.tell(step, "outcome", f"{outcome.found}: {settings(best.config)}; {outcome.stopped}")

    def _run(self) -> TrackedRun:
        spec = self._spec
        assert spec is not None
        parameters: dict[str, str | float] = {
            "objective": spec.objective,
            "budget_s": spec.budget_s,
            "device": spec.device,
            "data": spec.data,
        }
        return TrackedRun(
            project=Path(spec.model).stem,
            name=spec.name,
            key=spec.mark,
            parameters={**parameters, "sampler": spec.sampler, "seed": spec.seed},
            folder=StudyFiles(self._studies / spec.name).folder,
        )


def print_dry_run(spec: StudySpec, *, as_json: bool) -> None:
    """Probe the workload and print what a search would do."""
    with stop_signals() as stop, tempfile.TemporaryDirectory(prefix="autotune-dry-run-") as folder:
        dry_run = preview(spec, environment(stop), Path(folder))
    if as_json:
        print_json(_as_json(spec, dry_run))
    else:
        _print_preview(spec, dry_run)


def _as_json(spec: StudySpec, found: DryRun) -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        "sampler": spec.sampler,
        "configurations": found.size,
        "counted": found.exact,
        "search_s": found.search_s,
        "trial_s": found.trial_s,
        "baseline": dict(found.space.baseline),
        "first": [
            {"config": p.config, "expected_speedup": p.predicted.rate_per_s, "seconds": p.predicted.seconds}
            for p in found.first
        ],
    }


def _print_preview(spec: StudySpec, found: DryRun) -> None:
    def say(text: str) -> None:
        print_rich(Line(text))

    about = "" if found.exact else "about "
    say(f"{about}{found.size:,} legal configurations of {len(found.space.choices)} knobs.".capitalize())
    say(
        f"Searching may take {found.search_s:.0f} s of the budget of {spec.budget_s:.0f} s: about "
        f"{found.search_s / found.trial_s:.0f} trials of {found.trial_s:.0f} s each, fewer that compile. The rest "
        f"proves what was found."
    )
    say("First the baseline: " + " ".join(f"{n}={spell(v)}" for n, v in found.space.baseline.items()))
    if not found.first:
        say(f"Then what {spec.sampler} proposes.")
        return
    say("Then what won in earlier studies beside it; then, if each comes out as in most trainings:")
    table = plain_table("", "changed from the baseline", "expected", "takes", wrap=("changed from the baseline",))
    for number, proposal in enumerate(found.first, 1):
        changed, predicted = _changed(proposal.config, found.space.baseline), proposal.predicted
        table.add_row(str(number), changed, f"{predicted.rate_per_s:.2f}×", f"{predicted.seconds:.0f} s")
    print_rich(table)


@search_options(OPTIONS)
def search(
    typed: Mapping[str, Any],
    words: Command = None,
    track: Track = None,
    as_json: Json = False,
    no_input: NoInput = False,
) -> None:
    """Search for the fastest way to train a model on this machine, or a training script as it stands."""
    spec = make_spec(typed, words or ())
    if typed["replay"] is not None:
        search_surface(typed["replay"], spec, typed, as_json=as_json)
    elif typed["dry_run"]:
        print_dry_run(spec, as_json=as_json)
    else:
        with stop_signals() as stop:
            env = environment(stop)
            observer = TrackedSearch(env.observer, check(track or ()), typed["studies_dir"])
            with observer.tracking:
                result = search_study(spec, typed["studies_dir"], replace(env, observer=observer))
                observer.concludes(result.outcome)
        end_search(result, as_json=as_json)
