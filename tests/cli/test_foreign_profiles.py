"""Profiles from somebody else: they choose no code to run, and ask for no more than a machine can stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autotune.base.errors import UsageError
from autotune.cli.main import run
from autotune.machine.host import read_host
from autotune.profile import Profile, dump, parse
from autotune.profile.schema import ProfileWorkload
from autotune.search.request import model_of
from autotune.training.applied import Applied
from autotune.workload.catalog import find_workload

from ..unit.test_profile_refusals import TEXT  # noqa: TID252

#: Leaves a file when it is imported.
TRAP = "from pathlib import Path\n\nPath('sprung').write_text('')\n"


def naming(**workload: str) -> Profile:
    return parse(TEXT, "it").model_copy(
        update={"workload": ProfileWorkload(name="x", sha256="9f9f").model_copy(update=workload)}
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "trap.py").write_text(TRAP)
    return tmp_path


@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.parametrize("named", [{"path": "{folder}/trap.py"}, {"module": "trap:WORKLOAD"}, {"name": "./trap.py"}])
def test_a_profile_chooses_no_code(
    folder: Path, command: str, named: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    workload = {name: text.format(folder=folder) for name, text in named.items()}
    Path("p.yaml").write_text(dump(naming(**workload)))
    assert run([command, "--profile", "p.yaml", "--data", "synthetic"]) == 2
    assert "--model" in capsys.readouterr().err
    assert not Path("sprung").exists()


def test_code_that_is_what_was_measured_needs_no_name(folder: Path) -> None:
    ref = find_workload("trap.py", {})
    assert model_of(naming(path=str(ref.path), sha256=ref.sha256), "") == ref.path
    assert model_of(naming(name="resnet50"), "") == "resnet50"
    assert model_of(naming(name="vit_b_16"), "") == "vit_b_16"
    assert model_of(naming(module="trap:WORKLOAD"), "trap:WORKLOAD") == "trap:WORKLOAD"


def test_more_workers_than_a_machine_can_stand_are_refused(folder: Path) -> None:
    workers = 16 * max(4, read_host().cores) + 1
    asked = parse(re.sub("num_workers: 2", f"num_workers: {workers}", TEXT), "it")
    with pytest.raises(UsageError, match=f"num_workers={workers}: with .* cores, {workers - 1} is the most"):
        Applied(asked)
