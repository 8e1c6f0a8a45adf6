"""A script that takes long until it trains is told how many launches fit."""

from pathlib import Path

import pytest

from autotune.base.files import write_atomic
from autotune.base.layout import StudyFiles
from autotune.base.records import TrialResult, TrialStatus
from autotune.search.subject import slow_start
from tests.support import make_spec


def probed(folder: Path, start_s: float) -> StudyFiles:
    files = StudyFiles(folder)
    launch = files.launch("probe-1")
    launch.folder.mkdir(parents=True)
    phases = {"load": start_s / 2, "build": start_s / 4, "compile": start_s / 4, "warmup": 99.0}
    result = TrialResult(launch="probe-1", status=TrialStatus.COMPLETE, phase_s=phases, wall_s=1.0)
    write_atomic(launch.spec, make_spec(launch.folder).model_dump_json())
    write_atomic(launch.result, result.model_dump_json())
    return files


@pytest.mark.parametrize(
    ("start_s", "budget_s", "said"),
    [
        (5.0, 60.0, None),
        (20.0, 3600.0, None),
        # 60 s, and twice the 15 s of measuring.
        (
            60.0,
            600.0,
            "60 s until it trains, so that about 6 launches fit into the budget; --budget 24m has room for 12",
        ),
        (60.0, 1800.0, "60 s until it trains, so that about 15 launches fit into the budget"),
    ],
)
def test_it_is_told_if_it_matters(tmp_path: Path, start_s: float, budget_s: float, said: str | None) -> None:
    found = slow_start(probed(tmp_path, start_s), budget_s)
    assert found == (None if said is None else f"the script takes {said}")


def test_without_a_probe_nothing_is_told(tmp_path: Path) -> None:
    assert slow_start(StudyFiles(tmp_path), 60.0) is None
