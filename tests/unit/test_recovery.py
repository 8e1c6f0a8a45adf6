"""Resuming a study after a kill at any moment, and after transient failures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from autotune.base.layout import StudyFiles
from autotune.base.records import TRANSIENT, Trial, TrialResult, TrialStatus
from autotune.samplers.sampler import CONSTRAINT
from autotune.space import key
from autotune.study.history import History
from autotune.study.tables import read_trials

from .remembering import BASELINE, OTHER, SPACE, complete, leave_folder, new_study, queue_unfinished, run_one


@pytest.fixture
def files(tmp_path: Path) -> StudyFiles:
    return new_study(tmp_path)


def numbers_and_states(history: History) -> list[tuple[int, TrialState]]:
    return [(t.number, t.state) for t in history.optuna.get_trials(deepcopy=False)]


class TestRecover:
    def test_a_trial_with_a_result_in_its_folder_is_reported(self, files: StudyFiles) -> None:
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
    def test_a_trial_without_a_result_is_interrupted_and_enqueued_once(self, files: StudyFiles, half: str) -> None:
        history = History(files, SPACE)
        run_one(history, BASELINE, TrialStatus.COMPLETE)
        history.enqueue(OTHER)
        number, config, _ = history.ask()
        if half != "nothing":
            leave_folder(files, number, config, None)
        if half == "torn result":
            files.trial(number).result.write_text(complete(number).model_dump_json()[:100])
        for _ in range(3):
            # Killed repeatedly, each time right after the recovery.
            history = History(files, SPACE)
            for found in history.recover():
                assert found.config == OTHER and found.result.status is TrialStatus.INTERRUPTED
                history.record(found)
            queue_unfinished(history)
        assert numbers_and_states(history) == [(0, TrialState.COMPLETE), (1, TrialState.FAIL), (2, TrialState.WAITING)]
        assert history.ask() == (2, OTHER, 1)
        assert not history.waiting

    def test_an_interrupted_repeat_is_repeated(self, files: StudyFiles) -> None:
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
    def test_a_kill_between_recording_and_reporting(self, files: StudyFiles, told: str) -> None:
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

    def test_a_kill_while_the_sampler_was_suggesting(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        run_one(history, BASELINE, TrialStatus.COMPLETE)
        history.optuna.ask().suggest_categorical("precision", ["fp32", "bf16"])
        # Killed here: the trial has only a precision, and was never launched.
        history = History(files, SPACE)
        for found in history.recover():
            history.record(found)
        queue_unfinished(history)
        assert not history.waiting, "half a configuration is nothing to try again"
        assert [t.number for t in read_trials(files)] == [0, 1]

    @pytest.mark.slow
    def test_a_search_that_is_really_killed_can_be_resumed(self, files: StudyFiles) -> None:
        code = (
            "import os, signal, sys\n"
            "sys.path.insert(0, sys.argv[2])\n"
            "from pathlib import Path\n"
            "import remembering as here\n"
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
    @pytest.mark.slow
    @pytest.mark.parametrize("status", sorted(TRANSIENT))
    def test_a_transient_failure_is_tried_three_times_in_all(self, files: StudyFiles, status: TrialStatus) -> None:
        history = History(files, SPACE)
        run_one(history, OTHER, status, transient=True)
        for attempt in (2, 3):
            # A resume keeps the number of attempts.
            history = History(files, SPACE)
            assert key(OTHER) not in history.tried
            queue_unfinished(history)
            number, config, repeats = history.ask()
            assert (number, config, repeats) == (attempt - 1, OTHER, attempt - 2)
            ended = TrialResult(launch=f"{number:05d}", status=status, transient=True)
            history.record(Trial(number=number, config=config, result=ended, repeats=repeats))
        for remembered in (history, History(files, SPACE)):
            assert remembered.unfinished == [] and remembered.tried == {key(OTHER)}

    def test_a_disturbance_is_forgotten_by_the_next_run(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        for _ in range(3):
            run_one(history, OTHER, TrialStatus.INTERRUPTED, transient=True)
        assert history.tried == {key(OTHER)}
        history = History(files, SPACE)
        assert not history.tried and [t.number for t in history.unfinished] == [0, 1, 2]

    def test_a_success_at_the_second_attempt_is_final(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        run_one(history, OTHER, TrialStatus.CRASHED, transient=True)
        queue_unfinished(history)
        number, config, repeats = history.ask()
        history.record(Trial(number=number, config=config, result=complete(number), score=50.0, repeats=repeats))
        assert history.unfinished == [] and history.tried == {key(OTHER)}

    def test_a_result_reported_by_the_child_alone_counts(self, files: StudyFiles) -> None:
        """After a kill between the child's report and the launcher's verdict, only the report exists."""
        history = History(files, SPACE)
        history.enqueue(OTHER)
        number, config, _ = history.ask()
        died = TrialResult(launch="00000", status=TrialStatus.LOADER_WORKER_DIED, transient=True)
        leave_folder(files, number, config, died)
        history = History(files, SPACE)
        for found in history.recover():
            history.record(found)
        assert [t.number for t in history.unfinished] == [0] and not history.tried

    def test_interruptions_by_the_user_do_not_count_as_attempts(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        for _ in range(5):
            run_one(history, OTHER, TrialStatus.INTERRUPTED)
        assert key(OTHER) not in history.tried and history.unfinished

    def test_any_other_status_is_final_at_once(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        statuses = [s for s in TrialStatus if s not in {*TRANSIENT, TrialStatus.INTERRUPTED}]
        for status, config in zip(statuses, SPACE.grid(), strict=False):
            run_one(history, config, status)
            assert key(config) in history.tried, status
        assert len(history.tried) == len(statuses) and history.unfinished == []
