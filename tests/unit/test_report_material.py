"""The data of a report, read from a study's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.base.layout import LaunchFiles, StudyFiles
from autotune.base.records import LaunchKind, StudySpec, TrialResult, TrialSpec, TrialStatus
from autotune.report import read_material, report_on, to_text
from autotune.study.request import write_request
from tests.support import make_measurement, make_outcome, make_probe, make_spec

SPEC = StudySpec(name="resnet50-1", mark="m", created="2026-11-21T10:22:31+00:00", model="resnet50")


@pytest.fixture
def files(tmp_path: Path) -> StudyFiles:
    study = StudyFiles(tmp_path / "resnet50-1")
    study.folder.mkdir()
    write_request(study, SPEC)
    return study


def leave(files: LaunchFiles, spec: TrialSpec, result: TrialResult | None) -> None:
    files.folder.mkdir(parents=True)
    files.spec.write_text(spec.model_dump_json())
    if result is not None:
        files.result.write_text(result.model_dump_json())


def test_launches_are_read_with_their_windows_and_the_probe_with_them(files: StudyFiles) -> None:
    complete = TrialResult(launch="x", status=TrialStatus.COMPLETE, measurement=make_measurement(30.0))
    trial = make_spec(files.trial(0).folder, number=0, image_size=128, devices=("cuda:0",))
    leave(files.trial(0), trial, complete)
    probe = TrialResult(launch="probe-1", status=TrialStatus.COMPLETE, probe=make_probe(torch_version="9.9"))
    leave(files.launch("probe-1"), make_spec(files.launch("probe-1").folder, kind=LaunchKind.PROBE, config={}), probe)
    files.spent.write_text('{"spent_s": 12.5}')
    found = read_material(files, None, typed="resnet50-1", folder=files.folder.parent)
    assert [x.name for x in found.launches] == ["trial 0", "probe-1"]
    assert found.launches[0].result == complete and found.probe == probe.probe
    assert (found.device, found.image_size, found.data) == ("cuda:0", 128, trial.data)
    assert (found.spec, found.spent_s) == (SPEC, 12.5)


def test_what_is_damaged_is_left_out(files: StudyFiles) -> None:
    whole = TrialResult(launch="x", status=TrialStatus.COMPLETE)
    for name, result in (("kept", whole), ("killed", None), ("damaged", whole), ("foreign", whole)):
        leave(files.launch(name), make_spec(files.launch(name).folder), result)
    files.launch("damaged").result.write_text(whole.model_dump_json()[:-9])
    files.launch("foreign").spec.write_text('{"made": "by another version"}')
    files.spent.write_text("{}")
    files.profile.write_text("no: profile")
    found = read_material(files, make_outcome(), typed="resnet50-1", folder=files.folder.parent)
    assert [x.name for x in found.launches] == ["kept"]
    assert (found.spent_s, found.profile, found.trials) == (None, None, [])
    assert "There is no profile in the study's folder that could be read." in to_text(report_on(found))
