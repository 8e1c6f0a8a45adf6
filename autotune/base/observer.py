"""Events of a running search. The search calls an observer, such as the CLI's panel.

All calls come from the search's own thread, one at a time, and must return quickly, because they are made from the
loop that monitors a child. An observer never raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.base.records import Beat, Config, StudyHeat, StudySpec, Trial


class Observer:
    """Listens to one search. This one ignores all events; others are derived from it, and have the methods of the
    events that they want, or `event`."""

    def event(self, name: str, *values: Any) -> None:
        """Any event that has no method of its own in a derived class: the method's name, and its arguments."""

    def begins(self, spec: StudySpec, headline: str) -> None:
        """The search starts or resumes. ``headline``: model, device, image size, data, in one line."""
        self.event("begins", spec, headline)

    def says(self, sentence: str) -> None:
        """A sentence for the user: what is waited for, why the search ends."""
        self.event("says", sentence)

    def data_progress(self, done: int, total: int) -> None:
        """``done`` of ``total`` files of a generated set have been written."""
        self.event("data_progress", done, total)

    def launch_begins(self, title: str, config: Config) -> None:
        """A child starts. ``title`` names its purpose: ``trial 7``, ``verifying trial 7, launch 2``."""
        self.event("launch_begins", title, config)

    def heat_begins(self, title: str, entrants: Sequence[Config]) -> None:
        """A child starts in which configurations train in turns. The first is the reference; beats say whose turn it
        is, and how fast it ran."""
        self.event("heat_begins", title, entrants)

    def beat(self, beat: Beat) -> None:
        """The running child reports progress; of several, the one that has begun last."""
        self.event("beat", beat)

    def trial_ends(self, trial: Trial) -> None:
        """A trial has ended and is on disk. When a search resumes, earlier trials are reported again first."""
        self.event("trial_ends", trial)

    def heat_ends(self, heat: StudyHeat) -> None:
        """A heat has ended and is on disk. When a search resumes, earlier heats are reported again first."""
        self.event("heat_ends", heat)

    def clock(self, spent_s: float, budget_s: float) -> None:
        """How much of the budget has been used; called several times a second."""
        self.event("clock", spent_s, budget_s)

    def ends(self) -> None:
        """The search is over, however it ended."""
        self.event("ends")
