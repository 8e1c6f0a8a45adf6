"""The data of a report, read from a study's folder. Launches no process and writes nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from autotune.base.errors import AutotuneError
from autotune.base.layout import StudyFiles
from autotune.base.records import (
    DataRef,
    Failure,
    Measurement,
    Outcome,
    Probe,
    StudyHeat,
    StudySpec,
    Trial,
    TrialResult,
    TrialSpec,
)
from autotune.profile import Profile, read
from autotune.space.requirements import Requirements
from autotune.study.history import read_launches
from autotune.study.loop import read_failure
from autotune.study.request import read_request
from autotune.study.tables import read_choices, read_heats, read_trials


@dataclass(frozen=True)
class LaunchRecord:
    """One child process: its instructions and its result."""

    spec: TrialSpec
    result: TrialResult

    @property
    def name(self) -> str:
        """``trial 7``, or the launch's own name."""
        return self.spec.launch if self.spec.number is None else f"trial {self.spec.number}"


@dataclass(frozen=True)
class Material:
    """A study as read from its folder.

    Attributes:
        typed: the study as a command-line argument, relative to the reader's current folder.
        folder: the reader's current folder, absolute.
        outcome: ``None`` while the search is not finished.
        launches: the launches whose folders can be read, with their windows and steps.
        profile: ``None`` if there is no readable profile.
        spent_s: the used part of the budget; ``None`` if unknown.
        choices: the values of each knob, written as on the command line.
    """

    name: str
    typed: str
    folder: PurePath
    spec: StudySpec
    trials: Sequence[Trial]
    outcome: Outcome | None = None
    launches: Sequence[LaunchRecord] = ()
    profile: Profile | None = None
    spent_s: float | None = None
    failure: Failure | None = None
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    heats: Sequence[StudyHeat] = ()

    @property
    def probe(self) -> Probe | None:
        """The result of the last probe."""
        probes = [launch.result.probe for launch in self.launches if launch.result.probe is not None]
        return probes[-1] if probes else None

    @property
    def required(self) -> Requirements:
        return Requirements.parsed(self.spec.require, self.spec.goal)

    @property
    def data(self) -> DataRef | None:
        return next((launch.spec.data for launch in self._training()), None)

    @property
    def image_size(self) -> int | None:
        return next((launch.spec.image_size for launch in self._training()), self.spec.image_size)

    @property
    def device(self) -> str:
        """The device's name in records, such as ``cpu`` or ``cuda:0``."""
        requested = self.outcome.device if self.outcome else self.spec.device
        return next((launch.spec.devices[0] for launch in self._training() if launch.spec.devices), requested)

    def _training(self) -> list[LaunchRecord]:
        return [launch for launch in self.launches if launch.spec.config]

    def measured(self) -> list[tuple[LaunchRecord, Measurement]]:
        """Return the launches that have a measurement."""
        return [(x, x.result.measurement) for x in self.launches if x.result.measurement is not None]


def read_material(files: StudyFiles, outcome: Outcome | None, *, typed: str, folder: PurePath) -> Material:
    """Read a study's folder. Damaged launches, and a damaged profile, are omitted.

    Raises:
        UsageError: ``study.yaml`` is missing or damaged.
        MachineError: ``study.db`` cannot be read.
    """
    profile: Profile | None = None
    with contextlib.suppress(AutotuneError, OSError):
        profile = read(files.profile)
    spent_s: float | None = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        spent_s = float(json.loads(files.spent.read_text())["spent_s"])
    return Material(
        name=files.name,
        typed=typed,
        folder=folder,
        spec=read_request(files),
        trials=read_trials(files),
        outcome=outcome,
        launches=[LaunchRecord(spec, result) for spec, result in read_launches(files)],
        profile=profile,
        spent_s=spent_s,
        failure=read_failure(files),
        choices=read_choices(files),
        heats=read_heats(files),
    )
