"""Matrices of searches: what their files say, what is wrong in them, and which cells are queued."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.base.errors import UsageError
from autotune.base.layout import StudyFiles
from autotune.base.records import JobRequest, JobRow, JobState, StudySpec
from autotune.cli.matrix import Asked, Cell, planned, read_matrix
from autotune.cluster.slurm_queue import Allocation
from autotune.profile import Profile
from autotune.profile.in_force import Slot, SlotState
from autotune.study.request import write_request
from autotune.workload.catalog import find_workload
from tests.support import PROFILE_DATA

from .test_profile_store import here, profile

KNOWN = (
    *("--model", "--script", "--arg", "--budget", "--data", "--device", "--gres", "--study"),
    *("--batch-size", "--keep-batch-size"),
)
MATRIX = """\
defaults: {budget: 30m, data: /data}
models:
  - resnet50
  - {model: mine.py, arg: {depth: 4}, budget: 1h}
targets:
  here:
  h100: {to: slurm, gres: "gpu:h100:1", data: /lustre/data, hardware: H100 PCIe}
batches: [64, 128]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "matrix.yaml"


def test_each_cell_is_a_command_line(file: Path) -> None:
    file.write_text(MATRIX)
    found = read_matrix(file, KNOWN, ("--arg",))
    assert found.targets == ("here", "h100")
    assert [(c.model, c.batch, c.target) for c in found.cells[:4]] == [
        *(("resnet50", 64, "here"), ("resnet50", 64, "h100"), ("resnet50", 128, "here"), ("resnet50", 128, "h100")),
    ]
    last = found.cells[-1]
    assert " ".join(last.words) == (
        "--budget 1h --data /lustre/data --model mine.py --arg depth=4 --gres gpu:h100:1 "
        "--batch-size 128 --keep-batch-size"
    )
    assert (last.to, last.hardware, last.more, last.line) == ("slurm", "H100 PCIe", "depth=4", 4)


def test_a_list_of_searches_is_a_matrix_of_one_target(file: Path) -> None:
    file.write_text("defaults: {budget: 5m, arg: [a=1, b=2]}\njobs: [resnet50, {script: train.py, budget: 1h}]")
    first, second = read_matrix(file, KNOWN, ("--arg",)).cells
    file.write_text(
        "jobs: [{model: resnet50, batch-size: 64, keep-batch-size: true}, {model: resnet50, batch-size: 64}]"
    )
    assert [cell.batch for cell in read_matrix(file, KNOWN, ("--arg",)).cells] == [64, None]
    assert (first.model, first.target, first.batch) == ("resnet50", "here", None)
    assert " ".join(first.words) == "--budget 5m --arg a=1 --arg b=2 --model resnet50"
    assert (second.model, " ".join(second.words)) == ("train", "--budget 1h --arg a=1 --arg b=2 --script train.py")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("models: {", r"is not YAML \(line 1\)"),
        ("[]", "has no models"),
        ("jobs: []", "has no models"),
        ("jobs: [resnet50]\nmodels:", "has both models and jobs"),
        ("jobs: [resnet50]\ntargets:", "line 2: targets must have names"),
        ("jobs: [resnet50]\ntargets: {a: {model: ''}}", "line 1: a model has a name"),
        ("jobs: [{set: {compile_mode: null}}]", "line 1: unknown option 'set'"),
        ("jobs: [{model: x}]\nbudget: 5m", "line 2: unknown key 'budget'"),
        ("jobs: [resnet50]\nmodels: [resnet50]", "has both models and jobs"),
        (MATRIX.replace("here:", "h100:"), "line 7 repeats a key"),
        (MATRIX.replace("arg:", "args:"), "line 4: unknown option 'args'"),
        (MATRIX.replace("gres:", "study:"), "line 7: study cannot stand in a file"),
        (MATRIX.replace("  here:", "  a b:"), "line 6: 'a b' cannot name a target"),
        (MATRIX.replace("slurm", "slum"), "line 7: unknown queue 'slum'"),
        (MATRIX.replace("H100 PCIe", "7"), "line 7: hardware must be text, not 7"),
        (MATRIX.replace("128]", "big]"), "line 8: a batch size is a whole number above zero, not 'big'"),
        (MATRIX.replace("batches", "batch"), "line 8: unknown key 'batch'"),
        (MATRIX.replace("- resnet50", "- {budget: 5m}"), "line 3: a model has a name"),
        (MATRIX.replace("depth: 4", "depth: [[4]]"), None),
        (MATRIX.replace("budget: 1h", "budget: [[1]]"), "line 4: budget has no value that an option can have"),
        (MATRIX.replace("- resnet50", "- {model: [a, b]}"), "line 3: model has one value, not several"),
        (MATRIX.replace("budget: 1h", "budget: [1h, 2h]"), "line 4: budget has one value, not several"),
        (MATRIX.replace("budget: 1h", "batch_size: 8"), "line 4: batch-size stands beside batches"),
        (MATRIX.replace("budget: 1h", "keep-batch-size: true"), "line 4: keep-batch-size stands beside batches"),
        (MATRIX.replace("mine.py, arg", "mine.py, to: slurm, arg"), "line 4: unknown option 'to'"),
    ],
)
def test_what_is_wrong_is_one_sentence_with_its_line(file: Path, text: str, says: str | None) -> None:
    file.write_text(text)
    if says is None:
        read_matrix(file, KNOWN, ("--arg",))
        return
    with pytest.raises(UsageError, match=says) as caught:
        read_matrix(file, KNOWN, ("--arg",))
    assert str(caught.value).startswith(str(file))


class Case:
    """One cell, its jobs, and the profiles in force, on a machine with an H200."""

    def __init__(self, folder: Path, *, to: str = "daemon", hardware: str | None = None) -> None:
        spec = StudySpec(name="", mark="m", created="2026-11-25T20:00:00+00:00", model="resnet50")
        request = JobRequest(spec=spec, label="resnet50", studies_dir=str(folder), folder=str(folder), python="python")
        cell = Cell(0, "resnet50", "", "", "there", None, to, hardware, (), 1)
        self.asked = Asked(cell, to, request, Allocation(), "resnet50-there-1a2b3c4d")
        self.studies = folder
        self.jobs: list[JobRow] = []
        self.profiles: list[Slot] = []

    def ask(self, spec: StudySpec) -> None:
        self.asked = replace(self.asked, request=self.asked.request.model_copy(update={"spec": spec}))

    def job(self, study: str, state: JobState, refreshes: str | None = None) -> None:
        number = len(self.jobs) + 1
        told = {"model": "resnet50", "priority": 0, "submitted": "", "refreshes": refreshes}
        self.jobs.append(JobRow.model_validate({"id": number, "state": state, "study": study, **told}))

    def keep(self, kept: Profile, **noted: str) -> None:
        stale = tuple((name, value, "another") for name, value in noted.items())
        self.profiles.append(Slot("slot", kept, SlotState(stale=stale), self.studies))

    def plan(self, *, again: bool = False) -> tuple[str | None, str]:
        (found,) = planned([self.asked], self.jobs, self.profiles, here(), again=again)
        return found.study, found.why


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


NAME = "resnet50-there-1a2b3c4d"
CODE = {"values": {"workload_sha256": find_workload("resnet50", {}).sha256}}


def test_a_cell_that_nobody_has_asked_for_is_queued(case: Case) -> None:
    assert case.plan() == (NAME, "missing")


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.RUNNING, JobState.PAUSED])
def test_a_cell_is_not_queued_twice(case: Case, state: JobState) -> None:
    case.job(NAME, state)
    assert case.plan() == (None, f"job 1 is {state.value}")
    assert case.plan(again=True)[0] is None


def test_a_cell_whose_profile_is_searched_for_again_is_left_out(case: Case) -> None:
    case.ask(spec_like(profile()))
    case.keep(profile(**{"values": {**CODE["values"], "driver": "570.1"}}))
    case.job("resnet50-7", JobState.QUEUED, refreshes="another")
    assert case.plan()[0] == NAME
    case.job("resnet50-8", JobState.RUNNING, refreshes="slot")
    assert case.plan() == (None, "job 2, which searches again for its profile, is running")
    assert case.plan(again=True)[0] is None


def test_of_earlier_studies_some_may_be_gone(case: Case) -> None:
    case.job(f"{NAME}-10", JobState.FAILED)
    assert case.plan()[0] == f"{NAME}-11"
    case.job(f"{NAME}-2", JobState.RUNNING)
    assert case.plan() == (None, "job 2 is running")


def test_what_failed_is_queued_again_under_another_name(case: Case) -> None:
    case.job(NAME, JobState.FAILED)
    case.job(f"{NAME}-2", JobState.CANCELLED)
    assert case.plan() == (f"{NAME}-3", f"study {NAME}-2 is without an answer")


def test_a_search_without_a_verdict_is_repeated_only_if_that_is_wanted(case: Case) -> None:
    case.job(NAME, JobState.DONE)
    study, why = case.plan()
    assert study is None and "has searched for it" in why
    assert case.plan(again=True) == (f"{NAME}-2", "asked for again")


def test_a_study_that_was_begun_from_elsewhere_is_left_alone(case: Case) -> None:
    files = StudyFiles(case.studies / NAME)
    files.folder.mkdir()
    assert case.plan() == (None, f"its study {NAME} is there, from elsewhere")
    assert case.plan(again=True)[0] == f"{NAME}-2"
    files.failure.write_text("{}")
    assert case.plan()[0] == f"{NAME}-2"


def test_a_profile_in_force_spares_a_search_unless_it_is_stale(case: Case) -> None:
    case.ask(spec_like(profile()))
    case.keep(profile(**CODE))
    assert case.plan() == (None, "its profile is in force: 2.00× (1.90 to 2.10)")
    assert case.plan(again=True)[0] == NAME
    case.keep(profile(**{"values": {**CODE["values"], "driver": "570.1"}}))
    assert case.plan()[0] is None
    del case.profiles[0]
    assert case.plan() == (NAME, "its profile is stale: driver was 570.1, is 580.95")


@pytest.mark.parametrize(
    "changed",
    [
        {"values": {"gpu_model": "NVIDIA A100", **CODE["values"]}},
        {"conditions": {"keeps_batch_size": True}, **CODE},
        {"conditions": {"ranks": 2}, **CODE},
        {"conditions": {"data": "folder"}, **CODE},
        {"workload": {"name": "resnet18"}, **CODE},
    ],
)
def test_the_profile_of_another_training_or_machine_spares_none(case: Case, changed: dict[str, object]) -> None:
    case.ask(spec_like(profile()))
    case.keep(profile(**changed))
    assert case.plan() == (NAME, "missing")


@pytest.mark.parametrize(
    "asked",
    [
        {"fixed": {"precision": "fp32"}},
        {"narrowed": {"precision": ("bf16",)}},
        {"baseline": {"precision": "fp32"}},
        {"require": ("peak_memory<=8GiB",)},
        {"memory_limit_bytes": 2**30},
        {"global_batch": 1024},
        {"store_latency_s": 0.08},
        {"epochs": 3},
        {"command": {"words": ("python", "train.py", "--depth", "18"), "folder": "/"}},
        {"data": "/data/A"},
        {"data": "synthetic"},
        {"image_size": 224},
        {"seed": 1},
    ],
)
def test_what_a_profile_does_not_tell_of_its_search_is_taken_as_another(case: Case, asked: dict[str, object]) -> None:
    data = asked.get("data", "")
    kept = profile(conditions={"data": "folder"}, **CODE) if str(data).startswith("/") else profile(**CODE)
    case.ask(StudySpec.model_validate({**spec_like(kept).model_dump(), **asked}))
    case.keep(kept)
    assert case.plan() == (NAME, "missing")


@pytest.mark.parametrize(
    ("pixels", "device", "fits"), [(96, "cuda:0", False), (224, "cuda:0", True), (32, "cpu", False)]
)
def test_a_default_image_size_is_that_of_the_workload(case: Case, pixels: int, device: str, *, fits: bool) -> None:
    conditions = {"image_size": pixels, "device": device}
    kept = profile(conditions=conditions, values={**CODE["values"], **({"gpu_model": None} if device == "cpu" else {})})
    case.ask(spec_like(kept).model_copy(update={"image_size": None, "device": device}))
    case.keep(kept)
    assert (case.plan()[0] is None) == fits
    case.ask(spec_like(kept).model_copy(update={"image_size": pixels, "device": device}))
    assert case.plan()[0] is None


def test_the_profile_of_its_own_study_comes_first_and_variables_are_not_told(case: Case) -> None:
    case.ask(spec_like(profile()))
    case.keep(profile(**CODE))
    own = {"study": NAME}
    case.keep(profile(provenance=own, values={**CODE["values"], "driver": "570.1"}))
    assert case.plan() == (NAME, "its profile is stale: driver was 570.1, is 580.95")
    del case.profiles[1]
    case.asked = replace(case.asked, allocation=Allocation(environment={"LR": "0.1"}))
    assert case.plan() == (NAME, "missing")


def test_the_profile_of_a_narrower_search_spares_none(case: Case) -> None:
    case.ask(spec_like(profile()))
    case.keep(profile(**CODE))
    files = StudyFiles(case.studies / PROFILE_DATA["provenance"]["study"])
    files.folder.mkdir()
    for told, fits in (({"baseline": {"precision": "fp32"}}, True), ({"fixed": {"precision": "fp32"}}, False)):
        write_request(files, spec_like(profile()).model_copy(update=told))
        assert (case.plan()[0] is None) == fits


def test_the_profile_of_another_machines_daemon_is_not_its_own(case: Case) -> None:
    own = {"study": NAME}
    case.keep(profile(provenance=own, values={"gpu_model": "NVIDIA A100", **CODE["values"]}))
    assert case.plan() == (NAME, "missing")
    (case.studies / NAME).mkdir()
    (case.studies / NAME / "outcome.json").write_text("{}")
    assert case.plan() == (None, "its profile is in force: 2.00× (1.90 to 2.10)")


def spec_like(one: Profile) -> StudySpec:
    """Return the request of a search that finds a profile."""
    return StudySpec(
        name="",
        mark="m",
        created="2026-11-25T20:00:00+00:00",
        model=one.workload.model,
        args=one.workload.args,
        data="/data" if one.conditions.data == "folder" else one.conditions.data,
        objective=one.provenance.objective,
        image_size=one.conditions.image_size,
    )


def test_hardware_of_another_queue_is_told_by_its_name_or_by_the_study(tmp_path: Path) -> None:
    for named, fits in (
        ("h100", True),
        ("H100 80GB", True),
        ("h10", False),
        ("100", False),
        ("a100", False),
        (None, False),
    ):
        case = Case(tmp_path, to="slurm", hardware=named)
        case.ask(spec_like(profile()))
        conditions = {"device_name": "NVIDIA H100 80GB HBM3"}
        case.keep(profile(conditions=conditions, values={"gpu_model": "NVIDIA H100 80GB HBM3", **CODE["values"]}))
        assert (case.plan()[0] is None) == fits
    provenance = {"study": f"{NAME}-2"}
    case.keep(profile(provenance=provenance, values={"gpu_model": "NVIDIA A100", **CODE["values"]}), driver="570.1")
    # What changed on the other machine was noted there.
    assert case.plan()[1] == "its profile is stale: driver was 570.1, is another"
