"""How many samples of its data set a study's launches have read, one launch after another."""

from __future__ import annotations

from autotune.layout import StudyFiles
from autotune.records import TrialResult, TrialSpec
from autotune.study.history import read_launches

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
            self._samples = 0
            for spec, result in read_launches(self._files):
                # Launches are not listed in the order of their time.
                self._samples = max(self._samples, spec.first_sample + self._of(spec, result))
        return self._samples

    def add(self, spec: TrialSpec, result: TrialResult) -> None:
        """Count a launch that has ended."""
        self._samples = max(self.samples, spec.first_sample + self._of(spec, result))

    def _of(self, spec: TrialSpec, result: TrialResult) -> int:
        if spec.command is not None:
            # A script reads in an order of its own.
            return 0
        if result.samples_drawn is None:
            return self._most or GUESS_BATCHES * spec.batch_size
        self._most = max(self._most, result.samples_drawn)
        return result.samples_drawn
