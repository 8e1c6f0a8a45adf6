"""Studies in a database that several machines share, which here is a file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
import sqlalchemy

from autotune.base.errors import UsageError
from autotune.base.layout import StudyFiles
from autotune.base.records import StudySpec
from autotune.study import database as shared_module
from autotune.study.database import SharedDatabase, SharedStudy, open_shared, open_to_read
from autotune.study.request import write_request
from autotune.study.storage_url import StorageUrl

SPEC = StudySpec(name="net-1", mark="m", created="c", model="resnet50")


class FileUrl(StorageUrl):
    """The URL of a file, which no search takes."""

    def for_driver(self) -> sqlalchemy.URL:
        return sqlalchemy.make_url(self.address)


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(SharedDatabase, "_arguments", {})
    monkeypatch.setattr(shared_module, "with_credentials", FileUrl)
    return f"sqlite:///{tmp_path}/shared.db"


@pytest.fixture
def files(tmp_path: Path) -> StudyFiles:
    files = StudyFiles(tmp_path / "net-1")
    files.folder.mkdir()
    write_request(files, SPEC)
    return files


def made(address: str) -> SharedDatabase:
    return SharedDatabase(FileUrl(address), make=True)


def test_a_search_that_fails_early_leaves_a_database_for_others(address: str, files: StudyFiles) -> None:
    before = open_to_read(address)
    assert not before.is_made and before.names() == set()
    made(address).close()
    # As another command finds it, and as the same process does, which has looked before.
    for database in (SharedDatabase(FileUrl(address), make=False), before):
        assert database.is_made and database.names() == set()
    study = SharedStudy(made(address), SPEC.mark)
    open_shared(study, SPEC, files)
    assert SharedStudy(before, SPEC.mark).name == "net-1" and before.names() == {"net-1"}


def test_a_database_with_half_of_the_tables_is_not_made_yet(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SharedDatabase, "_rdb", property(killed))
        with pytest.raises(KeyboardInterrupt):
            made(address)
    half = SharedDatabase(FileUrl(address), make=False)
    assert not half.is_made and half.names() == set() and SharedStudy(half, SPEC.mark).name is None
    made(address)
    assert half.is_made


@pytest.mark.parametrize("used", [lambda study: study.ask(), lambda study: None])
def test_somebody_elses_study_is_not_taken(
    address: str, files: StudyFiles, used: Callable[[optuna.Study], object]
) -> None:
    used(optuna.create_study(study_name="net-1", storage=address))
    assert open_to_read(address).names() == {"net-1"}
    shared = SharedStudy(made(address), SPEC.mark)
    with pytest.raises(UsageError, match="has another study 'net-1'"):
        open_shared(shared, SPEC, files)
    assert not shared.is_entered
    other = SPEC.model_copy(update={"name": "net-2"})
    assert open_shared(shared, other, files).study_name == shared.enter(other) == "net-2"


def test_a_copied_folder_does_not_go_on_with_the_trials_of_the_original(address: str, files: StudyFiles) -> None:
    def opened(files: StudyFiles) -> str:
        return open_shared(SharedStudy(made(address), SPEC.mark), SPEC, files).study_name

    assert opened(files) == opened(files) == "net-1"
    copied = StudyFiles(Path(shutil.copytree(files.folder, files.folder.with_name("copied"))))
    with pytest.raises(UsageError, match="is a copy of .*net-1, and both have the same trials") as caught:
        opened(copied)
    assert "--fork" in str(caught.value.advice)
    # The original is renamed, and later it is gone.
    moved = StudyFiles(files.folder.rename(files.folder.with_name("moved")))
    assert opened(moved) == "net-1"
    shutil.rmtree(moved.folder)
    assert opened(copied) == "net-1"
