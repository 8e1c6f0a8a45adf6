"""Everything a report is made of, read from a study's folder. Nothing is launched and nothing is written."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from autotune.errors import AutotuneError
from autotune.layout import StudyFiles
from autotune.profile import Profile, read
from autotune.records import DataRef, Failure, Measurement, Outcome, Probe, StudySpec, Trial, TrialResult, TrialSpec
from autotune.study.failure import read_failure
from autotune.study.history import read_choices, read_launches, read_trials
from autotune.study.request import read_request


@dataclass(frozen=True)
class LaunchRecord:
    """One child process: what it was told, and how it ended."""

    spec: TrialSpec
    result: TrialResult

    @property
    def name(self) -> str:
        """``trial 7``, or the launch's own name."""
        return self.spec.launch if self.spec.number is None else f"trial {self.spec.number}"


@dataclass(frozen=True)
class Material:
    """A study as it lies there.

    Attributes:
        name: of the study; typed: how commands take it from the reader's current folder.
        folder: the reader's current folder, absolute.
        trials: as the study remembers them, in order.
        outcome: ``None`` while the search is not finished.
        launches: all whose folders can still be read, with their windows and steps.
        profile: ``None`` where there is none, or none that can be read.
        spent_s: of the budget; ``None`` where it is not known.
        failure: the error that ended its last run, if one did.
        choices: the values that each knob could take, as on the command line.
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

    @property
    def probe(self) -> Probe | None:
        """What the last probe found."""
        found = [launch.result.probe for launch in self.launches if launch.result.probe is not None]
        return found[-1] if found else None

    @property
    def data(self) -> DataRef | None:
        """The data that was trained on."""
        return next((launch.spec.data for launch in self._training()), None)

    @property
    def image_size(self) -> int | None:
        return next((launch.spec.image_size for launch in self._training()), self.spec.image_size)

    @property
    def device(self) -> str:
        """The contract name of the device."""
        asked = self.outcome.device if self.outcome else self.spec.device
        return next((launch.spec.devices[0] for launch in self._training() if launch.spec.devices), asked)

    def _training(self) -> list[LaunchRecord]:
        return [launch for launch in self.launches if launch.spec.config]

    def measured(self) -> list[tuple[LaunchRecord, Measurement]]:
        """The launches that measured something."""
        return [(x, x.result.measurement) for x in self.launches if x.result.measurement is not None]


def read_material(files: StudyFiles, outcome: Outcome | None, *, typed: str, folder: PurePath) -> Material:
    """Read a study's folder. What single launches or the profile are damaged beyond reading is left out.

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
    )
