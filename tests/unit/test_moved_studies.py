"""A study whose folder was renamed or copied, or whose database was moved away, in virtual time."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import optuna
import pytest

from autotune.base.errors import MachineError, ResumeRefusedError
from autotune.base.layout import StudyFiles
from autotune.base.records import Trial
from autotune.launcher import STUDY_MARK
from autotune.search import load_outcome, resume, search
from autotune.space import key
from autotune.study.request import process_mark, read_request
from autotune.study.tables import read_trials

from .world import FIXED, World, plain

REQUEST = {"budget_s": 3000, "fixed": {**FIXED, "precision": "bf16"}, "narrowed": {"batch_size": ("32", "64", "128")}}
del REQUEST["fixed"]["batch_size"]  # type: ignore[attr-defined]
#: Launches before the kill: the probe, trial 0, and trial 1; trial 2 is killed.
KILLED_AT = 4


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "studies")


@pytest.fixture
def stopped(world: World) -> World:
    with pytest.raises(KeyboardInterrupt):
        search(world.spec(**REQUEST), world.folder, world.env(plain, raise_at={KILLED_AT: KeyboardInterrupt()}))
    return world


def rename(files: StudyFiles) -> StudyFiles:
    return StudyFiles(files.folder.rename(files.folder.with_name("another")))


def copy(files: StudyFiles) -> StudyFiles:
    return StudyFiles(Path(shutil.copytree(files.folder, files.folder.with_name("copy"))))


def without_database(files: StudyFiles) -> StudyFiles:
    files.database.rename(files.folder / "study.db.old")
    return files


def with_older_database(files: StudyFiles) -> StudyFiles:
    """Put back a database in which trial 1 was still waiting, and trial 2 was not known."""
    study = optuna.load_study(study_name="s", storage=files.storage_url)
    (first, *_) = study.get_trials()
    attributes = study.user_attrs
    files.database.unlink()
    older = optuna.create_study(study_name="s", storage=files.storage_url, direction="maximize")
    for name, value in attributes.items():
        older.set_user_attr(name, value)
    older.add_trial(first)
    older.enqueue_trial({})
    return files


def measured(files: StudyFiles) -> dict[str, bytes]:
    return {str(f.relative_to(files.folder)): f.read_bytes() for f in files.trials.glob("*/result.json")}


def without_predictions(trials: list[Trial]) -> list[Trial]:
    return [t.model_copy(update={"predicted": None}) for t in trials]


@pytest.mark.slow
@pytest.mark.parametrize("happened", [rename, copy, without_database, with_older_database])
def test_nothing_measured_is_overwritten_and_the_search_goes_on(
    stopped: World, tmp_path: Path, happened: Callable[[StudyFiles], StudyFiles]
) -> None:
    before, trials = measured(stopped.files), read_trials(stopped.files)
    assert len(trials) == 2
    files = happened(stopped.files)
    if not files.database.exists():
        unscored = [t.model_copy(update={"score": None, "predicted": None}) for t in trials]
        assert read_trials(files) == unscored
    resume(files, stopped.env(plain))
    assert {name: content for name, content in measured(files).items() if name in before} == before
    now = read_trials(files)
    assert without_predictions(now[:2]) == without_predictions(trials)
    assert now[2].result.status == "interrupted" and now[3].repeats == 2
    assert [t.number for t in now] == list(range(len(now)))
    # The end is that of a search that nothing happened to.
    whole = World(tmp_path / "whole")
    search(whole.spec(**REQUEST), whole.folder, whole.env(plain))
    assert {key(t.config) for t in now} == {key(t.config) for t in read_trials(whole.files)}
    outcome = load_outcome(files)
    assert outcome is not None and outcome.study == files.name
    assert outcome.best.config == whole.outcome.best.config
    with_optuna = optuna.load_study(study_name=None, storage=files.storage_url)
    assert with_optuna.best_value == max(t.score or 0.0 for t in now)


@pytest.mark.slow
def test_without_its_database_a_study_still_refuses_another_machine(stopped: World) -> None:
    without_database(stopped.files)
    with pytest.raises(ResumeRefusedError) as caught:
        resume(stopped.files, stopped.env(plain, torch_version="3.0.0"))
    assert ("torch", "2.9.0", "3.0.0") in caught.value.differences
    # Older studies have no such file. What they measured tells the workload and the data.
    stopped.files.conditions.unlink()
    stopped.files.database.unlink()
    for _ in range(2):
        with pytest.raises(ResumeRefusedError) as caught:
            resume(stopped.files, stopped.env(plain, workload_sha256="edited"))
        assert [row[0] for row in caught.value.differences] == ["workload_sha256"]


@pytest.mark.slow
def test_a_trial_folder_that_cannot_be_read_keeps_its_number(stopped: World) -> None:
    without_database(stopped.files)
    stopped.files.trial(1).spec.write_text("garbage")
    shutil.rmtree(stopped.files.trial(0).folder)
    resume(stopped.files, stopped.env(plain))
    trials = read_trials(stopped.files)
    assert [t.config for t in trials[:2]] == [{}, {}]
    assert stopped.files.trial(1).spec.read_text() == "garbage"
    assert stopped.outcome.best.speedup > 1


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"garbage" * 600, b""], ids=["garbage", "empty"])
def test_a_garbage_database_is_left_alone_and_can_be_moved_away(stopped: World, content: bytes) -> None:
    before = measured(stopped.files)
    stopped.files.database.write_bytes(content)
    if content:
        with pytest.raises(MachineError, match="cannot be opened") as caught:
            resume(stopped.files, stopped.env(plain))
        assert stopped.files.database.read_bytes() == content and "move it away" in str(caught.value.advice)
        stopped.files.database.unlink()
    resume(stopped.files, stopped.env(plain))
    assert {name: found for name, found in measured(stopped.files).items() if name in before} == before


def test_somebody_elses_database_is_left_alone(stopped: World) -> None:
    stopped.files.database.unlink()
    theirs = optuna.create_study(study_name="theirs", storage=stopped.files.storage_url)
    theirs.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    content = stopped.files.database.read_bytes()
    for use in (lambda: resume(stopped.files, stopped.env(plain)), lambda: read_trials(stopped.files)):
        with pytest.raises(MachineError, match="'theirs', a study that autotune did not make"):
            use()
    assert stopped.files.database.read_bytes() == content


def test_a_database_of_another_version_of_optuna_is_left_alone(stopped: World) -> None:
    with closing(sqlite3.connect(stopped.files.database)) as connection, connection:
        connection.execute("update alembic_version set version_num = 'v9.9.9.a'")
    content, trials = stopped.files.database.read_bytes(), len(read_trials(stopped.files))
    with pytest.raises(MachineError, match="no longer compatible"):
        resume(stopped.files, stopped.env(plain))
    assert stopped.files.database.read_bytes() == content and len(read_trials(stopped.files)) == trials > 0


@pytest.mark.slow
def test_a_resumed_copy_leaves_the_processes_of_the_original_alone(stopped: World) -> None:
    mark = process_mark(stopped.files, read_request(stopped.files))
    with subprocess.Popen(["sleep", "60"], env={**os.environ, STUDY_MARK: mark}) as running:
        resume(copy(stopped.files), stopped.env(plain))
        assert running.poll() is None
        # Those of the study itself are found by any name of its folder.
        resume(rename(stopped.files), stopped.env(plain))
        assert running.wait(timeout=10) == -signal.SIGKILL
