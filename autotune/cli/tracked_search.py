"""``autotune search --track``: a study as one run in experiment trackers, with a step for each trial."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.space.formatting import settings
from autotune.base.layout import StudyFiles
from autotune.base.observer import Observer
from autotune.base.records import Beat, Config, Outcome, StudyHeat, StudySpec, Trial
from autotune.base.tracking import TrackedRun, Tracker, Tracking, check


class TrackedSearch:
    """Hands a search's events on to its observer, and tells trackers of trials and outcome.

    Args:
        studies: the folder of the studies.
    """

    def __init__(self, observer: Observer, trackers: Sequence[type[Tracker]], studies: Path) -> None:
        self._observer = observer
        self._studies = studies
        self._spec: StudySpec | None = None
        self._tracking = Tracking(trackers, self._run, observer.says)

    def begins(self, spec: StudySpec, headline: str) -> None:
        self._spec = spec
        self._observer.begins(spec, headline)

    def says(self, sentence: str) -> None:
        self._observer.says(sentence)

    def data_progress(self, done: int, total: int) -> None:
        self._observer.data_progress(done, total)

    def launch_begins(self, title: str, config: Config) -> None:
        self._observer.launch_begins(title, config)

    def heat_begins(self, title: str, entrants: Sequence[Config]) -> None:
        self._observer.heat_begins(title, entrants)

    def beat(self, beat: Beat) -> None:
        self._observer.beat(beat)

    def trial_ends(self, trial: Trial) -> None:
        self._observer.trial_ends(trial)
        self._tracking.log(trial.number, {"samples_per_second": trial.rate_per_s, "score": trial.score})
        told = f"{trial.result.status}: {settings(trial.config)}"
        self._tracking.tell(trial.number, f"trial/{trial.number:05d}", told)

    def heat_ends(self, heat: StudyHeat) -> None:
        self._observer.heat_ends(heat)

    def clock(self, spent_s: float, budget_s: float) -> None:
        self._observer.clock(spent_s, budget_s)

    def ends(self) -> None:
        self._observer.ends()

    def concludes(self, outcome: Outcome) -> None:
        """Tell the outcome of the search, which is over."""
        best, step = outcome.best, sum(outcome.trials.values())
        rates = {"best_samples_per_second": best.samples_per_second, "speedup": best.speedup}
        self._tracking.log(step, {**rates, "baseline_samples_per_second": outcome.baseline.samples_per_second})
        self._tracking.tell(step, "outcome", f"{outcome.found}: {settings(best.config)}; {outcome.stopped}")

    def end(self, *, failed: bool) -> None:
        """End the run in the trackers."""
        self._tracking.end(failed=failed)

    def _run(self) -> TrackedRun:
        spec = self._spec
        assert spec is not None
        asked: dict[str, str | float] = {
            "objective": spec.objective,
            "budget_s": spec.budget_s,
            "device": spec.device,
            "data": spec.data,
        }
        return TrackedRun(
            project=Path(spec.model).stem,
            name=spec.name,
            key=spec.mark,
            parameters={**asked, "sampler": spec.sampler, "seed": spec.seed},
            folder=StudyFiles(self._studies / spec.name).folder,
        )


@contextlib.contextmanager
def tracked_search(observer: Observer, names: Sequence[str], studies: Path) -> Iterator[TrackedSearch]:
    """Yield an observer that tells trackers of a search, and end its run with the block.

    Raises:
        UnknownNameError, UsageError: see `autotune.base.tracking.check`.
    """
    tracked = TrackedSearch(observer, check(names), studies)
    try:
        yield tracked
    except BaseException:
        tracked.end(failed=True)
        raise
    tracked.end(failed=False)
