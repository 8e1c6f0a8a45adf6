"""Reads the stored trials and heats of a study, without opening it for writing."""

from __future__ import annotations

import optuna

from autotune.base.errors import AutotuneError, MachineError, UsageError
from autotune.base.layout import StudyFiles
from autotune.base.records import Fingerprint, StudyHeat, Trial
from autotune.samplers.translate import heats_of
from autotune.study.conditions import BASELINE
from autotune.study.database import IF_DAMAGED, name_in, refusal
from autotune.study.history import FINGERPRINT, SPACE, finished, slim
from autotune.study.launch_files import read_launches
from autotune.study.request import read_request
from autotune.study.shared import SharedStudy, open_to_read


def read_trials(files: StudyFiles) -> list[Trial]:
    """Return the finished trials of a study in order of their numbers, without opening the study for writing.

    If the database has been moved away, they are read from their folders, which do not have their scores.

    Raises:
        MachineError: the study's database cannot be read.
    """
    study = _open_to_read(files)
    if study is not None:
        return finished(study.get_trials(deepcopy=False))
    return [
        Trial(number=spec.number, config=spec.config, result=slim(result), repeats=spec.repeats)
        for spec, result in read_launches(files)
        if spec.number is not None
    ]


def read_heats(files: StudyFiles) -> list[StudyHeat]:
    """Return the heats of a study in order; none if its database has been moved away.

    Raises:
        MachineError: the study's database cannot be read.
    """
    study = _open_to_read(files)
    return [] if study is None else heats_of(study)


def read_fingerprint(files: StudyFiles) -> Fingerprint | None:
    """Return the fingerprint that a study is tied to; ``None`` if there is none yet.

    Raises:
        MachineError: the study's database cannot be read.
    """
    study = _open_to_read(files)
    found = None if study is None else study.user_attrs.get(FINGERPRINT)
    return None if found is None else Fingerprint.model_validate(found)


def read_choices(files: StudyFiles) -> dict[str, list[str]]:
    """Return the values that a study may choose from, for each knob; empty before its first search.

    Raises:
        MachineError: the study's database cannot be read.
    """
    study = _open_to_read(files)
    found: dict[str, list[str]] = {} if study is None else study.user_attrs.get(SPACE, {})
    return {name: values for name, values in found.items() if name != BASELINE}


def _open_to_read(files: StudyFiles) -> optuna.Study | None:
    if not files.database.exists():
        return _shared(files)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        # A plain open would create missing tables, at the same time as the search that is creating them.
        storage = optuna.storages.RDBStorage(files.storage_url, skip_table_creation=True, skip_compatibility_check=True)
        name = name_in(storage, files)
        # Without a name, the search was killed before its first trial.
        return None if name is None else optuna.load_study(study_name=name, storage=storage)
    except AutotuneError:
        raise
    except Exception as error:  # SQLAlchemy's and sqlite3's errors have no common base
        refused = refusal(error)
        if refused is not None and str(refused).startswith("no such table"):
            return None  # the search is being created, or was killed at that point
        raise MachineError(f"{files.database} cannot be read: {error}".splitlines()[0], advice=IF_DAMAGED) from error


def _shared(files: StudyFiles) -> optuna.Study | None:
    """Return the study in the database that several machines share, if that is where it is."""
    try:
        spec = read_request(files)
    except UsageError:
        return None  # as without a database
    if spec.storage is None:
        return None
    shared = SharedStudy(open_to_read(spec.storage), spec.mark)
    # Without a name, the search was killed before its first trial.
    return None if shared.name is None else optuna.load_study(study_name=shared.name, storage=shared.optuna)
