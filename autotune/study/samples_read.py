"""How many samples of its data set a study's launches have read, one launch after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autotune.base.layout import LaunchFiles, StudyFiles
from autotune.base.records import TrialResult, TrialSpec
from autotune.study.launch_files import read_launch

#: What a launch without a result is taken to have read, in batches, before any launch has told.
GUESS_BATCHES = 64


class SamplesRead:
    """Counts samples over all launches of a study, those of earlier runs included.

    The count of a launch that could not tell (it was killed) is taken to be the largest so far.
    """

    def __init__(self, files: StudyFiles) -> None:
        self._files = files
        self._samples: int | None = None
        self._most = 0

    @property
    def samples(self) -> int:
        """Samples that have been read so far: the place in the study's order that the next launch begins at."""
        if self._samples is None:
            launches = list(_launches(self._files))
            # Launches are not listed in the order of their time, and the largest count is to be known first.
            self._most = max((r.samples_drawn or 0 for _, r in launches if r is not None), default=0)
            self._samples = max((spec.first_sample + self._of(spec, r) for spec, r in launches), default=0)
        return self._samples

    def after(self, running: Iterable[TrialSpec]) -> int:
        """Return the place at which the next launch begins while others still read: each of them is taken to read as
        many as the most so far."""
        samples = self.samples
        return max([samples, *(spec.first_sample + self._of(spec, None) for spec in running)])

    def add(self, spec: TrialSpec, result: TrialResult) -> None:
        """Count a launch that has ended."""
        self._samples = max(self.samples, spec.first_sample + self._of(spec, result))

    def _of(self, spec: TrialSpec, result: TrialResult | None) -> int:
        if spec.command is not None:
            # A script reads in an order of its own.
            return 0
        if result is None or result.samples_drawn is None:
            return self._most or GUESS_BATCHES * spec.batch_size
        self._most = max(self._most, result.samples_drawn)
        return result.samples_drawn


def _launches(files: StudyFiles) -> Iterator[tuple[TrialSpec, TrialResult | None]]:
    """Yield all launches that have begun; one that was killed together with the search has no result."""
    for folder in (*files.trials.glob("*"), *files.launches.glob("*")):
        spec, result = read_launch(LaunchFiles(folder))
        if spec is not None:
            yield spec, result
