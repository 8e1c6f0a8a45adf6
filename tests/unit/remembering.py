"""A small space and trials in it, shared by the tests of history and by a child process that they kill."""

from pathlib import Path
from typing import Any

from autotune.base.layout import StudyFiles
from autotune.base.records import Trial, TrialResult, TrialSpec, TrialStatus, Value
from autotune.space import Choice, Space
from autotune.study.history import History
from tests.support import make_measurement, make_spec

BASELINE: dict[str, Value] = {"precision": "fp32", "batch_size": 16, "num_workers": 0}
OTHER: dict[str, Value] = {
    "precision": "bf16",
    "batch_size": 32,
    "num_workers": 1,
    "prefetch_factor": 2,
    "persistent_workers": True,
}
SPACE = Space(
    {
        "precision": (Choice("fp32"), Choice("bf16"), Choice("fp16", "needs a CUDA device")),
        "batch_size": (Choice(16), Choice(32)),
        "num_workers": (Choice(0), Choice(1)),
        "prefetch_factor": (Choice(2),),
        "persistent_workers": (Choice(False), Choice(True)),
    },
    {},
    BASELINE,
)
MEASUREMENT = make_measurement(50.0, batch_size=16)


def new_study(folder: Path) -> StudyFiles:
    (folder / "net-1").mkdir()
    return StudyFiles(folder / "net-1")


def spec_for(files: StudyFiles, number: int, config: dict[str, Value]) -> TrialSpec:
    return make_spec(files.trial(number).folder, number=number, config=config, batch_size=config["batch_size"])


def complete(number: int) -> TrialResult:
    return TrialResult(launch=f"{number:05d}", status=TrialStatus.COMPLETE, measurement=MEASUREMENT, evidence="log")


def leave_folder(files: StudyFiles, number: int, config: dict[str, Value], result: TrialResult | None) -> None:
    """Leave a launch's folder: its spec, and its result if there is one."""
    files.trial(number).folder.mkdir(parents=True)
    files.trial(number).spec.write_text(spec_for(files, number, config).model_dump_json())
    if result is not None:
        files.trial(number).result.write_text(result.model_dump_json())


def run_one(history: History, config: dict[str, Value], status: TrialStatus, **result: Any) -> Trial:
    history.enqueue(config)
    number, asked, repeats = history.ask()
    assert asked == config
    measured = MEASUREMENT if status is TrialStatus.COMPLETE else None
    ended = TrialResult(launch=f"{number:05d}", status=status, measurement=measured, **result)
    score = 50.0 if status is TrialStatus.COMPLETE else None
    return history.record(Trial(number=number, config=asked, result=ended, score=score, repeats=repeats))


def queue_unfinished(history: History) -> None:
    """Enqueue unfinished trials, as a search does before its own proposals."""
    if not history.waiting and history.unfinished:
        trial = history.unfinished[0]
        history.enqueue(trial.config, repeats=trial.number)
