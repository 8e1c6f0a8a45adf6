"""What a study remembers, in a real ``study.db``: each trial durable, nothing lost, nothing counted twice."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlite_utils
from optuna.trial import TrialState

from autotune.errors import MachineError, ResumeRefusedError
from autotune.launcher import TRANSIENT
from autotune.layout import StudyFiles
from autotune.records import (
    INFEASIBLE,
    DataRef,
    Fingerprint,
    LaunchKind,
    Measurement,
    Trial,
    TrialResult,
    TrialSpec,
    TrialStatus,
    Value,
    Window,
    WorkloadRef,
)
from autotune.search.translate import CONSTRAINT
from autotune.space import Choice, Space, key
from autotune.study.history import History, Ledger, read_trials, slim, write_result

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
FINGERPRINT = Fingerprint(values={"cores": 2, "torch": "2.15.0"}, device_uuid="GPU-1")
MEASUREMENT = Measurement(
    batch_size=16,
    samples_per_s=50.0,
    ci95_per_s=(49.0, 51.0),
    steady_per_s=50.0,
    windows=(Window(steps=1, samples=16, seconds=0.32),),
    step_s=(0.32,),
    wait_s=(0.01,),
    device_s=(0.31,),
    losses=(2.5,),
    startup_s=1.0,
    compile_s=0.5,
    warmup_s=0.7,
    measured_s=0.32,
    loader_wait_fraction=0.03,
    epoch_samples=1024,
    peak_allocated_bytes=2**20,
)


@pytest.fixture
def files(tmp_path: Path) -> StudyFiles:
    (tmp_path / "net-1").mkdir()
    return StudyFiles(tmp_path / "net-1")


def spec_for(files: StudyFiles, number: int, config: dict[str, Value]) -> TrialSpec:
    folder = files.trial(number).folder
    return TrialSpec(
        kind=LaunchKind.MEASURE,
        launch=folder.name,
        number=number,
        folder=str(folder),
        workload=WorkloadRef(name="net", path="/net.py", module="net"),
        data=DataRef(kind="none"),
        config=config,
        batch_size=int(config["batch_size"]),
    )


def complete(number: int) -> TrialResult:
    return TrialResult(launch=f"{number:05d}", status=TrialStatus.COMPLETE, measurement=MEASUREMENT, evidence="log")


def leave_folder(files: StudyFiles, number: int, config: dict[str, Value], result: TrialResult | None) -> None:
    """What a launch leaves: its spec, and its result if it came so far."""
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
    """What a search does before it asks for something new."""
    if not history.waiting and history.unfinished:
        trial = history.unfinished[0]
        history.enqueue(trial.config, repeats=trial.number)


def numbers_and_states(history: History) -> list[tuple[int, TrialState]]:
    return [(t.number, t.state) for t in history.optuna.get_trials(deepcopy=False)]


class TestRecord:
    def test_what_is_recorded_is_there_for_the_next_run(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        told = [run_one(history, BASELINE, TrialStatus.COMPLETE), run_one(history, OTHER, TrialStatus.OOM)]
        assert [t.number for t in told] == [0, 1]
        again = History(files, SPACE)
        assert again.trials == history.trials == told == read_trials(files)
        assert again.recover() == [] and not again.waiting

    def test_the_numbers_of_single_steps_stay_in_the_folder(self, files: StudyFiles) -> None:
        trial = run_one(History(files, SPACE), BASELINE, TrialStatus.COMPLETE, evidence="log")
        assert trial.result.evidence == "log" and trial.result.measurement is not None
        assert trial.result.measurement.step_s == () and trial.result.measurement.samples_per_s == 50.0
        assert slim(TrialResult(launch="x", status=TrialStatus.OOM, peak_bytes=7)).peak_bytes == 7

    def test_every_end_is_told_to_optuna_as_what_it_is(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        for status in TrialStatus:
            run_one(history, BASELINE, status, rate_seen_per_s=20.0 if status is TrialStatus.PRUNED else None)
        # Optuna alone, as anyone would open it.
        study = optuna.load_study(study_name="net-1", storage=f"sqlite:///{files.folder}/study.db")
        told = study.get_trials()
        assert [t.result.status for t in read_trials(files)] == list(TrialStatus)
        for status, frozen in zip(TrialStatus, told, strict=True):
            assert frozen.params == BASELINE
            assert (frozen.constraints[CONSTRAINT] > 0) == (status in INFEASIBLE)
            if status is TrialStatus.COMPLETE:
                assert frozen.state is TrialState.COMPLETE and frozen.value == 50.0
            elif status is TrialStatus.PRUNED:
                assert frozen.state is TrialState.PRUNED and frozen.intermediate_values == {1: 20.0}
            else:
                assert frozen.state is (TrialState.PRUNED if status in INFEASIBLE else TrialState.FAIL)
                assert frozen.intermediate_values == {} and frozen.values is None

    def test_a_pruned_trial_is_told_with_what_it_measured_and_is_not_complete(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        history.enqueue(OTHER)
        number, config, _ = history.ask()
        slow = MEASUREMENT.model_copy(update={"samples_per_s": 20.0})
        ended = TrialResult(launch="00000", status=TrialStatus.PRUNED, rate_seen_per_s=19.0, measurement=slow)
        told = history.record(Trial(number=number, config=config, result=ended))
        assert told.rate_per_s == 20.0 and told.score is None
        (frozen,) = history.optuna.get_trials()
        assert (frozen.state, frozen.intermediate_values) == (TrialState.PRUNED, {1: 20.0})
        with pytest.raises(ValueError, match="does not exist|completed"):
            _ = history.optuna.best_trial

    def test_optunas_best_is_ours(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        run_one(history, BASELINE, TrialStatus.COMPLETE)
        run_one(history, OTHER, TrialStatus.OOM)
        study = optuna.load_study(study_name=None, storage=f"sqlite:///{files.folder}/study.db")
        assert study.direction is optuna.study.StudyDirection.MAXIMIZE
        assert study.best_params == BASELINE and study.best_value == 50.0

    def test_a_baseline_outside_the_narrowed_choices_is_told_as_it_is(self, files: StudyFiles) -> None:
        space = Space({**SPACE.choices, "batch_size": (Choice(32),)}, {}, BASELINE)
        history = History(files, space)
        assert run_one(history, BASELINE, TrialStatus.COMPLETE).config == BASELINE


class TestRecover:
    def test_a_trial_whose_result_is_in_its_folder_is_told(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        history.enqueue(BASELINE)
        number, config, _ = history.ask()
        leave_folder(files, number, config, complete(number))
        # Killed here.
        history = History(files, SPACE)
        (found,) = history.recover()
        assert found.number == 0 and found.config == BASELINE and found.result == complete(0)
        history.record(found.model_copy(update={"score": 50.0}))
        queue_unfinished(history)
        assert numbers_and_states(history) == [(0, TrialState.COMPLETE)]
        assert History(files, SPACE).recover() == []

    @pytest.mark.parametrize("half", ["nothing", "spec", "torn result"])
    def test_one_without_is_interrupted_and_queued_again_once(self, files: StudyFiles, half: str) -> None:
        history = History(files, SPACE)
        run_one(history, BASELINE, TrialStatus.COMPLETE)
        history.enqueue(OTHER)
        number, config, _ = history.ask()
        if half != "nothing":
            leave_folder(files, number, config, None)
        if half == "torn result":
            files.trial(number).result.write_text(complete(number).model_dump_json()[:100])
        for _ in range(3):
            # Killed again and again, each time right after the recovery.
            history = History(files, SPACE)
            for found in history.recover():
                assert found.config == OTHER and found.result.status is TrialStatus.INTERRUPTED
                history.record(found)
            queue_unfinished(history)
        assert numbers_and_states(history) == [(0, TrialState.COMPLETE), (1, TrialState.FAIL), (2, TrialState.WAITING)]
        assert history.ask() == (2, OTHER, 1)
        assert not history.waiting

    def test_a_repeat_that_is_interrupted_is_repeated(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        run_one(history, OTHER, TrialStatus.INTERRUPTED)
        for expected in (1, 2, 3):
            queue_unfinished(history)
            number, config, repeats = history.ask()
            assert (number, config, repeats) == (expected, OTHER, expected - 1)
            history = History(files, SPACE)
            (found,) = history.recover()
            assert found.repeats == expected - 1
            history.record(found)
        queue_unfinished(history)
        number, config, repeats = history.ask()
        history.record(Trial(number=number, config=config, result=complete(number), score=50.0, repeats=repeats))
        queue_unfinished(history)
        assert not history.waiting

    @pytest.mark.parametrize("told", ["our record", "and the constraint"])
    def test_killed_between_the_record_and_the_telling(self, files: StudyFiles, told: str) -> None:
        history = History(files, SPACE)
        history.enqueue(OTHER)
        number, config, _ = history.ask()
        result = TrialResult(launch="00000", status=TrialStatus.OOM)
        leave_folder(files, number, config, result)
        trial = Trial(number=number, config=config, result=result)
        asked = optuna.Trial(history.optuna, history.optuna.get_trials(deepcopy=False)[0]._trial_id)
        asked.set_user_attr("autotune", trial.model_dump(mode="json"))
        if told == "and the constraint":
            asked.set_constraint(CONSTRAINT, 1.0)
        history = History(files, SPACE)
        assert history.trials == []
        (found,) = history.recover()
        history.record(found)
        assert [t.number for t in read_trials(files)] == [0]
        (frozen,) = history.optuna.get_trials()
        assert frozen.state is TrialState.PRUNED and frozen.constraints == {CONSTRAINT: 1.0}

    def test_killed_while_the_sampler_was_speaking(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        run_one(history, BASELINE, TrialStatus.COMPLETE)
        history.optuna.ask().suggest_categorical("precision", ["fp32", "bf16"])
        # Killed here: the trial has a precision and nothing else, and was never launched.
        history = History(files, SPACE)
        for found in history.recover():
            history.record(found)
        queue_unfinished(history)
        assert not history.waiting, "half a configuration is nothing to try again"
        assert [t.number for t in read_trials(files)] == [0, 1]

    def test_a_search_killed_for_real_leaves_a_study_that_goes_on(self, files: StudyFiles) -> None:
        code = (
            "import os, signal, sys\n"
            "sys.path.insert(0, sys.argv[2])\n"
            "from pathlib import Path\n"
            "import test_history as here\n"
            "history = here.History(here.StudyFiles(Path(sys.argv[1])), here.SPACE)\n"
            "here.run_one(history, here.BASELINE, here.TrialStatus.COMPLETE)\n"
            "history.enqueue(here.OTHER)\n"
            "history.ask()\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        command = [sys.executable, "-c", code, str(files.folder), str(Path(__file__).parent)]
        killed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert killed.returncode == -9, killed.stderr
        history = History(files, SPACE)
        assert [t.config for t in history.trials] == [BASELINE]
        assert [(t.number, t.result.status) for t in history.recover()] == [(1, TrialStatus.INTERRUPTED)]


class TestAttempts:
    @pytest.mark.parametrize("status", [*TRANSIENT, TrialStatus.INTERRUPTED])
    def test_what_failed_in_passing_is_tried_three_times_in_all(self, files: StudyFiles, status: TrialStatus) -> None:
        history = History(files, SPACE)
        run_one(history, OTHER, status, transient=True)
        for attempt in (2, 3):
            # A resume does not forget how often it was tried.
            history = History(files, SPACE)
            assert key(OTHER) not in history.tried
            queue_unfinished(history)
            number, config, repeats = history.ask()
            assert (number, config, repeats) == (attempt - 1, OTHER, attempt - 2)
            ended = TrialResult(launch=f"{number:05d}", status=status, transient=True)
            history.record(Trial(number=number, config=config, result=ended, repeats=repeats))
        for remembered in (history, History(files, SPACE)):
            assert remembered.unfinished == [] and remembered.tried == {key(OTHER)}

    def test_one_that_goes_well_the_second_time_is_done(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        run_one(history, OTHER, TrialStatus.CRASHED)
        queue_unfinished(history)
        number, config, repeats = history.ask()
        history.record(Trial(number=number, config=config, result=complete(number), score=50.0, repeats=repeats))
        assert history.unfinished == [] and history.tried == {key(OTHER)}

    def test_what_the_child_reported_itself_counts_though_nobody_judged_it(self, files: StudyFiles) -> None:
        """Killed between the child's report and the launcher's verdict, the report is all there is."""
        history = History(files, SPACE)
        history.enqueue(OTHER)
        number, config, _ = history.ask()
        leave_folder(files, number, config, TrialResult(launch="00000", status=TrialStatus.LOADER_WORKER_DIED))
        history = History(files, SPACE)
        for found in history.recover():
            history.record(found)
        assert [t.number for t in history.unfinished] == [0] and not history.tried

    def test_the_users_own_interruptions_are_no_attempts(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        for _ in range(5):
            run_one(history, OTHER, TrialStatus.INTERRUPTED)
        assert key(OTHER) not in history.tried and history.unfinished

    def test_everything_else_is_known_at_once(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        statuses = [s for s in TrialStatus if s not in {*TRANSIENT, TrialStatus.INTERRUPTED}]
        for status, config in zip(statuses, SPACE.grid(), strict=False):
            run_one(history, config, status)
            assert key(config) in history.tried, status
        assert len(history.tried) == len(statuses) and history.unfinished == []


class TestBind:
    def test_the_same_machine_and_space_may_go_on(self, files: StudyFiles) -> None:
        History(files, SPACE).bind(FINGERPRINT)
        # Another card of the same model is the same machine.
        History(files, SPACE).bind(FINGERPRINT.model_copy(update={"device_uuid": "GPU-2"}))

    def test_another_machine_is_refused_with_what_differs(self, files: StudyFiles) -> None:
        History(files, SPACE).bind(FINGERPRINT)
        other = Fingerprint(values={"cores": 4, "torch": "2.15.0"})
        with pytest.raises(ResumeRefusedError, match="net-1") as caught:
            History(files, SPACE).bind(other)
        assert caught.value.differences == (("cores", "2", "4"),)
        assert caught.value.exit_code == 6 and caught.value.advice

    def test_another_space_is_refused_with_what_differs(self, files: StudyFiles) -> None:
        History(files, SPACE).bind(FINGERPRINT)
        choices = {**SPACE.choices, "batch_size": (Choice(16), Choice(64)), "memory_format": (Choice("contiguous"),)}
        with pytest.raises(ResumeRefusedError) as caught:
            History(files, Space(choices, {}, {**BASELINE, "precision": "bf16"})).bind(FINGERPRINT)
        assert caught.value.differences == (
            (
                "choices of baseline",
                "precision=fp32, batch_size=16, num_workers=0",
                "precision=bf16, batch_size=16, num_workers=0",
            ),
            ("choices of batch_size", "16, 32", "16, 64"),
            ("choices of memory_format", "absent", "contiguous"),
        )

    def test_what_became_legal_is_another_space(self, files: StudyFiles) -> None:
        History(files, SPACE).bind(FINGERPRINT)
        now_legal = {**SPACE.choices, "precision": (Choice("fp32"), Choice("bf16"), Choice("fp16"))}
        with pytest.raises(ResumeRefusedError):
            History(files, Space(now_legal, {}, BASELINE)).bind(FINGERPRINT)

    def test_a_refusal_changes_nothing(self, files: StudyFiles) -> None:
        run_one(History(files, SPACE), BASELINE, TrialStatus.COMPLETE)
        History(files, SPACE).bind(FINGERPRINT)
        for _ in range(2):
            with pytest.raises(ResumeRefusedError):
                History(files, SPACE).bind(Fingerprint(values={"cores": 4}))
        history = History(files, SPACE)
        history.bind(FINGERPRINT)
        assert len(history.trials) == 1


class TestDatabase:
    @pytest.mark.parametrize("content", [b"this is no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 4096])
    def test_a_damaged_one_is_named_and_left_alone(self, files: StudyFiles, content: bytes) -> None:
        files.database.write_bytes(content)
        with pytest.raises(MachineError, match=r"study\.db cannot be opened") as caught:
            History(files, SPACE)
        assert caught.value.advice and "\n" not in str(caught.value)
        with pytest.raises(MachineError, match=r"study\.db cannot be read"):
            read_trials(files)
        assert files.database.read_bytes() == content

    def test_no_database_is_no_trials(self, files: StudyFiles) -> None:
        assert read_trials(files) == []
        assert not files.database.exists()

    def test_our_tables_are_there_for_anyone(self, files: StudyFiles) -> None:
        History(files, SPACE).bind(FINGERPRINT)
        ledger = Ledger(files)
        ledger.add(spec_for(files, 0, BASELINE), complete(0))
        ledger.add(spec_for(files, 1, OTHER), TrialResult(launch="00001", status=TrialStatus.OOM, peak_bytes=9))
        # Entered again, replaced.
        ledger.add(spec_for(files, 0, BASELINE), complete(0))
        with closing(sqlite3.connect(files.database)) as connection:
            rows = sorted(sqlite_utils.Database(connection)["autotune_launches"].rows, key=lambda r: r["launch"])
            settings = list(sqlite_utils.Database(connection)["autotune_settings"].rows)
        assert [(r["launch"], r["status"], r["samples_per_s"], r["peak_memory_bytes"]) for r in rows] == [
            ("00000", "complete", 50.0, 2**20),
            ("00001", "oom", None, 9),
        ]
        assert json.loads(rows[1]["config"]) == OTHER
        assert {(s["launch"], s["knob"], s["value"]) for s in settings} >= {
            ("00000", "precision", "fp32"),
            ("00001", "persistent_workers", "true"),
        }
        assert ledger.measured_s() == pytest.approx(0.32)

    def test_our_tables_are_a_view_of_the_folders(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        leave_folder(files, 0, BASELINE, complete(0))
        leave_folder(files, 1, OTHER, None)
        write_result(files.trial(1), TrialResult(launch="00001", status=TrialStatus.INTERRUPTED))
        assert Ledger(files).rebuild() == 2
        with closing(sqlite3.connect(files.database)) as connection:
            rows = connection.execute("select launch, status from autotune_launches order by launch").fetchall()
        assert rows == [("00000", "complete"), ("00001", "interrupted")]
        # And Optuna does not mind them.
        assert history.optuna.get_trials() == []

    def test_the_command_line_of_sqlite_utils_reads_them(self, files: StudyFiles) -> None:
        History(files, SPACE)
        Ledger(files).add(spec_for(files, 0, BASELINE), complete(0))
        command = [sys.executable, "-m", "sqlite_utils", "rows", str(files.database), "autotune_launches"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(done.stdout)
        assert row["launch"] == "00000" and row["trial"] == 0 and row["status"] == "complete"
