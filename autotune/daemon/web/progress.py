"""Where a search stands, from what it has told so far."""

from __future__ import annotations

from pathlib import Path

from autotune.daemon.job.events import tell
from autotune.observer import Silent
from autotune.records import Config, StudySpec, Trial

#: So much of the end of a long story is read; its first line says what it is about.
_TAIL_BYTES = 2**20


class Progress(Silent):
    """An observer that remembers.

    Attributes:
        headline: model, device, data. doing: the launch that runs. spent_s, budget_s: seconds.
        trials: in order, the latest telling of each. said: the last sentence.
    """

    def __init__(self) -> None:
        self.headline = ""
        self.doing = ""
        self.said = ""
        self.spent_s = 0.0
        self.budget_s: float | None = None
        self._trials: dict[int, Trial] = {}

    @property
    def trials(self) -> list[Trial]:
        return [self._trials[number] for number in sorted(self._trials)]

    def begins(self, spec: StudySpec, headline: str) -> None:
        self.headline = headline

    def says(self, sentence: str) -> None:
        self.said = sentence

    def launch_begins(self, title: str, config: Config) -> None:
        self.doing = title

    def trial_ends(self, trial: Trial) -> None:
        self._trials[trial.number] = trial

    def clock(self, spent_s: float, budget_s: float) -> None:
        self.spent_s, self.budget_s = spent_s, budget_s

    def ends(self) -> None:
        self.doing = ""


def read_progress(events: Path) -> Progress:
    """What a job's search has told; nothing, where it has told nothing yet."""
    found = Progress()
    try:
        with events.open("rb") as stream:
            first = stream.readline()
            size = events.stat().st_size
            stream.seek(max(stream.tell(), size - _TAIL_BYTES))
            rest = stream.read(_TAIL_BYTES)
    except OSError:
        return found
    for line in [first, *rest.splitlines()]:
        tell(line.decode(errors="replace"), found)
    return found
