"""The stored trials of a study in a real ``study.db``: each is durable, none is lost or counted twice."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import optuna
import pytest
import sqlite_utils
from optuna.trial import TrialState

from autotune.base.errors import MachineError, ResumeRefusedError
from autotune.base.layout import StudyFiles
from autotune.base.records import INFEASIBLE, Fingerprint, Trial, TrialResult, TrialStatus
from autotune.samplers.sampler import CONSTRAINT
from autotune.space import Choice, Space
from autotune.study.history import History, slim, write_result
from autotune.study.tables import LaunchTables, read_choices, read_trials

from .remembering import BASELINE, MEASUREMENT, OTHER, SPACE, complete, leave_folder, new_study, run_one, spec_for

FINGERPRINT = Fingerprint(values={"cores": 2, "torch": "2.15.0"}, device_uuid="GPU-1")


@pytest.fixture
def files(tmp_path: Path) -> StudyFiles:
    return new_study(tmp_path)


class TestRecord:
    def test_recorded_trials_are_there_in_the_next_run(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        told = [run_one(history, BASELINE, TrialStatus.COMPLETE), run_one(history, OTHER, TrialStatus.OOM)]
        assert [t.number for t in told] == [0, 1]
        again = History(files, SPACE)
        assert again.trials == history.trials == told == read_trials(files)
        assert again.recover() == [] and not again.waiting

    def test_per_step_values_stay_in_the_folder(self, files: StudyFiles) -> None:
        trial = run_one(History(files, SPACE), BASELINE, TrialStatus.COMPLETE, evidence="log")
        assert trial.result.evidence == "log" and trial.result.measurement is not None
        assert trial.result.measurement.step_s == () and trial.result.measurement.samples_per_s == 50.0
        assert slim(TrialResult(launch="x", status=TrialStatus.OOM, peak_bytes=7)).peak_bytes == 7

    def test_every_status_is_reported_to_optuna(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        for status in TrialStatus:
            run_one(history, BASELINE, status, rate_seen_per_s=20.0 if status is TrialStatus.PRUNED else None)
        # Opened with Optuna alone.
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

    def test_a_pruned_trial_is_reported_with_its_measurement_and_is_not_complete(self, files: StudyFiles) -> None:
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

    def test_a_baseline_outside_the_narrowed_choices_is_reported_unchanged(self, files: StudyFiles) -> None:
        space = Space({**SPACE.choices, "batch_size": (Choice(32),)}, {}, BASELINE)
        history = History(files, space)
        assert run_one(history, BASELINE, TrialStatus.COMPLETE).config == BASELINE


class TestBind:
    def test_the_same_machine_and_space_are_accepted(self, files: StudyFiles) -> None:
        History(files, SPACE).bind(FINGERPRINT)
        # Another card of the same model counts as the same machine.
        History(files, SPACE).bind(FINGERPRINT.model_copy(update={"device_uuid": "GPU-2"}))

    def test_another_machine_is_refused_with_the_differences(self, files: StudyFiles) -> None:
        History(files, SPACE).bind(FINGERPRINT)
        other = Fingerprint(values={"cores": 4, "torch": "2.15.0"})
        with pytest.raises(ResumeRefusedError, match="net-1") as caught:
            History(files, SPACE).bind(other)
        assert caught.value.differences == (("cores", "2", "4"),)
        assert caught.value.exit_code == 6 and caught.value.advice

    def test_another_space_is_refused_with_the_differences(self, files: StudyFiles) -> None:
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

    def test_a_value_that_became_legal_makes_another_space(self, files: StudyFiles) -> None:
        History(files, SPACE).bind(FINGERPRINT)
        now_legal = {**SPACE.choices, "precision": (Choice("fp32"), Choice("bf16"), Choice("fp16"))}
        with pytest.raises(ResumeRefusedError):
            History(files, Space(now_legal, {}, BASELINE)).bind(FINGERPRINT)

    def test_choices_are_read_without_opening_the_study_for_writing(self, files: StudyFiles) -> None:
        assert read_choices(files) == {}
        History(files, SPACE).bind(FINGERPRINT)
        assert read_choices(files) == {
            "precision": ["fp32", "bf16"],
            "batch_size": ["16", "32"],
            "num_workers": ["0", "1"],
            "prefetch_factor": ["2"],
            "persistent_workers": ["false", "true"],
        }

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
    def test_a_damaged_database_is_named_and_not_changed(self, files: StudyFiles, content: bytes) -> None:
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

    @pytest.mark.parametrize("made", [(), ("studies",), ("studies", "trials", "trial_values")])
    def test_a_reader_creates_no_tables_while_a_search_creates_them(
        self, files: StudyFiles, made: tuple[str, ...]
    ) -> None:
        """If both created the same tables, one would fail."""
        History(files, SPACE)
        with closing(sqlite3.connect(files.database)) as connection:
            tables = [name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")]
            for name in tables:
                if name not in made and not name.startswith("sqlite_"):
                    connection.execute(f"drop table {name}")
            connection.commit()
        before = files.database.read_bytes()
        assert read_trials(files) == []
        assert files.database.read_bytes() == before

    def test_our_tables_can_be_read_by_anyone(self, files: StudyFiles) -> None:
        History(files, SPACE).bind(FINGERPRINT)
        tables = LaunchTables(files)
        tables.add(spec_for(files, 0, BASELINE), complete(0))
        tables.add(spec_for(files, 1, OTHER), TrialResult(launch="00001", status=TrialStatus.OOM, peak_bytes=9))
        # A second insert replaces the row.
        tables.add(spec_for(files, 0, BASELINE), complete(0))
        with closing(sqlite3.connect(files.database)) as connection:
            rows = sorted(sqlite_utils.Database(connection)["autotune_launches"].rows, key=lambda r: r["launch"])
            settings = list(sqlite_utils.Database(connection)["autotune_settings"].rows)
        assert [(r["launch"], r["status"], r["samples_per_s"], r["peak_memory_bytes"]) for r in rows] == [
            ("00000", "complete", 50.0, MEASUREMENT.peak_allocated_bytes),
            ("00001", "oom", None, 9),
        ]
        assert json.loads(rows[1]["config"]) == OTHER
        assert {(s["launch"], s["knob"], s["value"]) for s in settings} >= {
            ("00000", "precision", "fp32"),
            ("00001", "persistent_workers", "true"),
        }
        assert tables.measured_s() == pytest.approx(MEASUREMENT.measured_s)

    def test_our_tables_can_be_rebuilt_from_the_folders(self, files: StudyFiles) -> None:
        history = History(files, SPACE)
        leave_folder(files, 0, BASELINE, complete(0))
        leave_folder(files, 1, OTHER, None)
        write_result(files.trial(1), TrialResult(launch="00001", status=TrialStatus.INTERRUPTED))
        assert LaunchTables(files).rebuild() == 2
        with closing(sqlite3.connect(files.database)) as connection:
            rows = connection.execute("select launch, status from autotune_launches order by launch").fetchall()
        assert rows == [("00000", "complete"), ("00001", "interrupted")]
        # Optuna still works.
        assert history.optuna.get_trials() == []

    def test_tables_of_older_versions_keep_their_rows(self, files: StudyFiles) -> None:
        """They had no version, and no study in each row."""
        History(files, SPACE)
        with closing(sqlite3.connect(files.database)) as connection:
            database = sqlite_utils.Database(connection)
            database["autotune_launches"].insert({"launch": "00007", "status": "oom", "measured_s": 2.0}, pk="launch")
            database["autotune_settings"].insert({"launch": "00007", "knob": "a", "value": "b"}, pk=("launch", "knob"))
            connection.commit()
        tables = LaunchTables(files)
        assert tables.measured_s() == 2.0
        tables.add(spec_for(files, 0, BASELINE), complete(0))
        with closing(sqlite3.connect(files.database)) as connection:
            rows = connection.execute("select study, launch, status from autotune_launches order by launch").fetchall()
            old = connection.execute("select study, knob, value from autotune_settings where launch = '00007'")
            assert old.fetchall() == [("net-1", "a", "b")]
        assert rows == [("net-1", "00000", "complete"), ("net-1", "00007", "oom")]

    def test_tables_of_a_newer_version_are_left_alone(self, files: StudyFiles) -> None:
        History(files, SPACE)
        LaunchTables(files).add(spec_for(files, 0, BASELINE), complete(0))
        with closing(sqlite3.connect(files.database)) as connection:
            connection.execute("update autotune_schema set version = 99")
            connection.commit()
        before = files.database.read_bytes()
        with pytest.raises(MachineError, match=r"study\.db was written by a newer autotune \(schema 99\)"):
            LaunchTables(files).add(spec_for(files, 1, OTHER), complete(1))
        assert files.database.read_bytes() == before and len(read_trials(files)) == 0

    def test_the_command_line_of_sqlite_utils_reads_them(self, files: StudyFiles) -> None:
        History(files, SPACE)
        LaunchTables(files).add(spec_for(files, 0, BASELINE), complete(0))
        command = [sys.executable, "-m", "sqlite_utils", "rows", str(files.database), "autotune_launches"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(done.stdout)
        assert row["launch"] == "00000" and row["trial"] == 0 and row["status"] == "complete"
