"""A workload that is edited while a search runs is noticed, without reading files that were not touched."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.base.errors import ResumeRefusedError, WorkloadError
from autotune.base.records import TrialSpec, TrialStatus
from autotune.search import resume, search
from autotune.study.launches import SourceWatch
from autotune.study.tables import read_trials
from autotune.workload import catalog
from autotune.workload.catalog import source_hash
from tests.support import Play

from .world import World, plain


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text("import net\nfrom late import part\n")
    (tmp_path / "net.py").write_text("WIDTH = 1\n")
    return tmp_path


@pytest.fixture
def watch(project: Path) -> SourceWatch:
    found = SourceWatch(project / "mine.py", source_hash(project / "mine.py"))
    assert found.edited() is None
    return found


def edit_in_place(project: Path) -> str:
    """Change one letter, and give the file its old times again."""
    before = os.stat(project / "net.py")
    (project / "net.py").write_text("WIDTH = 2\n")
    os.utime(project / "net.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    return "net.py"


def edit_as_editors_do(project: Path) -> str:
    (project / "swap").write_text("import net\nBATCH_SIZE = 4\n")
    os.replace(project / "swap", project / "mine.py")
    return "mine.py"


def hide_a_module(project: Path) -> str:
    """Add the file of a module that was imported from elsewhere."""
    (project / "late.py").write_text("part = 1\n")
    return "late.py"


def remove(project: Path) -> str:
    (project / "mine.py").unlink()
    return "mine.py"


@pytest.mark.parametrize("edit", [edit_in_place, edit_as_editors_do, hide_a_module, remove])
def test_an_edit_is_noticed(project: Path, watch: SourceWatch, edit: Callable[[Path], str]) -> None:
    assert watch.edited() is None
    name = edit(project)
    assert watch.edited() == name


def test_an_edit_that_is_undone_is_none(project: Path, watch: SourceWatch) -> None:
    (project / "net.py").write_text("WIDTH = 2\n")
    assert watch.edited() is not None
    (project / "net.py").write_text("WIDTH = 1\n")
    assert watch.edited() is None


def test_what_was_not_touched_is_not_read(watch: SourceWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_parse", lambda source: pytest.fail("read again"))
    assert watch.edited() is None


@pytest.mark.slow
@pytest.mark.parametrize("when", ["in a trial", "in the proof"])
def test_a_search_ends_with_what_was_measured_and_goes_on_when_the_edit_is_undone(tmp_path: Path, when: str) -> None:
    world = World(tmp_path / "studies")
    workload = tmp_path / "net_of_mine.py"
    workload.write_text("WIDTH = 1\n")

    def edited(spec: TrialSpec) -> Play:
        if spec.number == 2 if when == "in a trial" else spec.launch.startswith("check-"):
            workload.write_text("WIDTH = 2\n")
        return plain(spec)

    request = world.spec(model=str(workload))
    with pytest.raises(WorkloadError, match=r"net_of_mine\.py was edited meanwhile"):
        search(request, world.folder, world.env(edited))
    before = read_trials(world.files)
    assert not world.files.profile.exists()
    assert all(t.result.status is not TrialStatus.INTERRUPTED for t in before)
    workload.write_text("WIDTH = 1\n")
    resume(world.files, world.env(plain))
    now = read_trials(world.files)
    assert now[: len(before)] == before
    if when == "in a trial":
        assert now[2].result.cause == "net_of_mine.py was edited while it ran" and now[3].repeats == 2
    # What ran with the new code was launched again.
    first, last = world.launchers[0].specs[-1], world.launchers[-1].specs
    assert any((s.launch, s.config) == (first.launch, first.config) or s.repeats == first.number for s in last)


@pytest.mark.slow
def test_a_resume_with_an_edited_workload_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path / "studies")
    with pytest.raises(KeyboardInterrupt):
        search(world.spec(), world.folder, world.env(plain, raise_at={3: KeyboardInterrupt()}))
    with pytest.raises(ResumeRefusedError):
        resume(world.files, world.env(plain, workload_sha256="1" * 64))


def test_the_file_of_a_module_is_watched_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path / "studies")
    (tmp_path / "package_of_mine").mkdir()
    file = tmp_path / "package_of_mine" / "net.py"
    file.write_text("WORKLOAD = 1\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def edited(spec: TrialSpec) -> Play:
        if spec.number == 1:
            file.write_text("WORKLOAD = 2\n")
        return plain(spec)

    request = world.spec(model="package_of_mine.net:WORKLOAD")
    probe = {"workload_file": str(file), "workload_sha256": source_hash(file)}
    with pytest.raises(WorkloadError, match=r"net\.py was edited meanwhile"):
        search(request, world.folder, world.env(edited, **probe))
    assert len(read_trials(world.files)) == 1
