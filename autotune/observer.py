"""What a search says while it runs. The search calls; the CLI's panel, or nobody, listens.

All calls come from the search's own thread, one at a time, and must return quickly: the loop that watches a
child makes them. An observer never raises.
"""

from __future__ import annotations

from typing import Protocol

from autotune.records import Beat, Config, StudySpec, Trial


class Observer(Protocol):
    """Listens to one search."""

    def begins(self, spec: StudySpec, headline: str) -> None:
        """The search begins or goes on. ``headline``: model, device, image size, data, in one line."""
        ...

    def says(self, sentence: str) -> None:
        """Something a person should read once: what is waited for, why the search ends."""
        ...

    def data_progress(self, done: int, total: int) -> None:
        """``done`` of ``total`` files of a generated set are made."""
        ...

    def launch_begins(self, title: str, config: Config) -> None:
        """A child starts. ``title`` says what for: ``trial 7``, ``verifying trial 7, launch 2``."""
        ...

    def beat(self, beat: Beat) -> None:
        """The running child makes progress."""
        ...

    def trial_ends(self, trial: Trial) -> None:
        """A trial has ended and is on disk. On a resume, earlier trials are told again first."""
        ...

    def clock(self, spent_s: float, budget_s: float) -> None:
        """How much of the budget is used; several times a second."""
        ...

    def ends(self) -> None:
        """The search is over, however it ended."""
        ...


class Silent:
    """An observer that listens to nothing."""

    def begins(self, spec: StudySpec, headline: str) -> None: ...

    def says(self, sentence: str) -> None: ...

    def data_progress(self, done: int, total: int) -> None: ...

    def launch_begins(self, title: str, config: Config) -> None: ...

    def beat(self, beat: Beat) -> None: ...

    def trial_ends(self, trial: Trial) -> None: ...

    def clock(self, spent_s: float, budget_s: float) -> None: ...

    def ends(self) -> None: ...
