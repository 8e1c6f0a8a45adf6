"""The progress of a search, read from its event log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autotune.daemon.job.events import tell
from autotune.base.observer import Silent
from autotune.base.records import Config, StudySpec, Trial

#: Of a long event log, only the first line and this much of the end are read.
_TAIL_BYTES = 2**20


class Progress(Silent):
    """An observer that keeps the latest state of a search.

    Attributes:
        headline: model, device and data.
        doing: title of the current launch; empty if there is none.
        said: the last message.
        spent_s, budget_s: seconds of the budget spent, and in total.
        trials: the latest event of each trial, in order.
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

    def heat_begins(self, title: str, entrants: Sequence[Config]) -> None:
        self.doing = title

    def trial_ends(self, trial: Trial) -> None:
        self._trials[trial.number] = trial

    def clock(self, spent_s: float, budget_s: float) -> None:
        self.spent_s, self.budget_s = spent_s, budget_s

    def ends(self) -> None:
        self.doing = ""


def read_progress(events: Path) -> Progress:
    """Read the progress of a job's search. It is empty if the event log does not exist yet."""
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
