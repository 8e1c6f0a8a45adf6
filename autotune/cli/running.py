"""Code shared by the commands that run a search: signal handling, the environment, and the output at the end."""

from __future__ import annotations

import contextlib
import mmap
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import typer

from autotune.cli.output import print_json, print_rich
from autotune.report.panel import observer_for
from autotune.base.clock import SystemClock
from autotune.base.errors import SIGNALS, AutotuneError, NoVerdictError
from autotune.launcher.workers import Workers
from autotune.base.layout import StudyFiles, find_daemon
from autotune.base.observer import Observer
from autotune.profile import Profile
from autotune.profile.store import Store
from autotune.base.records import StudySpec
from autotune.report import best_table
from autotune.search import Environment, SearchResult
from autotune.search.request import Device
from autotune.study.reading import read_trials
from autotune.study.shared import SharedStudy


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], int | None]]:
    """Record signals instead of dying of them; yield a function that returns the first one received, or ``None``.

    Processes that are forked in this block have both in common with this one.
    """
    received = mmap.mmap(-1, 1)

    def receive(number: int, _frame: object) -> None:
        received[0] = received[0] or number

    before = {number: signal.signal(number, receive) for number in SIGNALS}
    try:
        yield lambda: received[0] or None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def environment(stop: Callable[[], int | None]) -> Environment:
    """Return the environment of a search on this machine, with a live panel if stderr is a terminal."""
    observer: Observer = observer_for(sys.stderr.isatty(), SystemClock())
    env = Environment.real(observer, stop)

    def sharing(shared: SharedStudy, files: StudyFiles, spec: StudySpec, device: Device, mark: str) -> Workers:
        # Imported when it is asked for: most searches are on one machine.
        from autotune.cluster.database_workers import workers_of

        return workers_of(shared, files, spec, device, mark, env.clock)

    return replace(env, workers=_workers, sharing=sharing)


def _workers(spec: StudySpec, mark: str) -> Workers:
    # Imported when it is asked for: most searches have no cluster.
    from autotune.cluster.ray_workers import RayWorkers

    return RayWorkers(spec, mark)


def end_search(found: SearchResult, *, as_json: bool) -> None:
    """Add the profile of a finished search to the profile store, and print the outcome.

    Raises:
        typer.Exit: there is no verdict.
    """
    profile = found.profile
    if profile is not None and found.outcome.evidence is None:
        _keep_profile(profile)
    if as_json:
        print_json(found.outcome.model_dump(mode="json"))
    else:
        print_rich(best_table(found.outcome, read_trials(found.files), Path.cwd()))
    if profile is None:
        raise typer.Exit(NoVerdictError.exit_code)


def _keep_profile(profile: Profile) -> None:
    """Add the profile to the store that `autotune profiles` and ``load_profile(model=…)`` read."""
    try:
        Store(find_daemon().profiles).keep(profile)
    except AutotuneError as error:
        # The search is finished, and its profile is in the study's folder in any case.
        typer.echo(f"autotune: the profile is not kept with the others: {error}", err=True)
