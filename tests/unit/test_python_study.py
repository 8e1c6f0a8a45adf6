"""`autotune.Study`: what a search in Python returns, and what `autotune.open_study` opens."""

from __future__ import annotations

import builtins
import os
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.base.errors import NoVerdictError, UnknownNameError
from autotune.base.layout import StudyFiles
from autotune.base.records import Finding
from autotune.search import SearchResult
from autotune.search.tuning import trial_rows
from tests.support import make_profile, make_trial
from tests.support.makers import make_outcome, make_standing

STUDIES = Path(__file__).parents[1] / "old" / "studies"
OPEN = {"finding": Finding.OPEN, "because": "others used the machine", "advice": "wait.", "profile": None}
SAME = make_standing(speedup=1.0, speedup_ci95=(1.0, 1.0))


def found(tmp_path: Path, **changes: Any) -> autotune.Study:
    files = StudyFiles(tmp_path / "mine-1")
    return autotune.Study(files, make_outcome(**changes), make_profile())


@pytest.fixture
def finished(tmp_path: Path) -> autotune.Study:
    """A real study, of an older version."""
    shutil.copytree(STUDIES / "finished", tmp_path / "finished")
    return autotune.open_study("finished", studies_dir=tmp_path)


class TestPrinted:
    def test_what_was_found(self, tmp_path: Path) -> None:
        study = found(tmp_path)
        assert study.finding is Finding.FASTER
        first, *rest = repr(study).splitlines()
        assert first.startswith("<Study mine-1: ") and "× the baseline (" in first
        assert [line.split()[0] for line in rest[:2]] == ["baseline", "best"]
        assert str(tmp_path / "mine-1" / "profile.yaml") in repr(study)
        assert "<table>" in study._repr_html_() and "mine-1" in study._repr_html_()

    def test_without_a_verdict_there_is_nothing_to_apply(self, tmp_path: Path) -> None:
        usual = {"baseline": SAME, "best": SAME, "best_same_batch": SAME}
        kept = found(tmp_path, **usual, finding=Finding.KEEP)
        assert kept.finding is Finding.KEEP and "nothing was shown to be faster" in repr(kept)
        nothing = found(tmp_path, **usual, **OPEN)
        assert "no verdict: others used the machine" in repr(nothing) and "profile.yaml" not in repr(nothing)
        with pytest.raises(
            NoVerdictError, match="there is no profile: no verdict: others used the machine; wait."
        ) as caught:
            _ = nothing.profile
        assert caught.value.advice == "wait."

    def test_a_search_without_a_verdict_warns(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        outcome = make_outcome(baseline=SAME, best=SAME, best_same_batch=SAME, **OPEN)
        result = SearchResult(StudyFiles(tmp_path / "mine-1"), outcome)
        monkeypatch.setenv("AUTOTUNE_STATE_DIR", str(tmp_path / "state"))
        monkeypatch.setattr(autotune.search.tuning, "search_study", lambda *_: result)
        with pytest.warns(UserWarning, match="no verdict: others used the machine; wait.") as caught:
            autotune.tune("resnet50", studies_dir=tmp_path)
        assert caught[0].filename == __file__


class TestOpened:
    def test_by_name_or_folder(self, finished: autotune.Study, tmp_path: Path) -> None:
        assert repr(autotune.open_study(tmp_path / "finished")) == repr(finished)
        assert repr(finished).startswith("<Study finished: ")
        with pytest.raises(UnknownNameError, match="unknown study 'finishd'"):
            autotune.open_study("finishd", studies_dir=tmp_path)

    def test_its_profile_is_applied_as_a_loaded_one_is(self, finished: autotune.Study) -> None:
        elsewhere = finished.folder / "profile.yaml"
        elsewhere.write_text(elsewhere.read_text().replace("cores: 2", "cores: 999"))
        with pytest.warns(UserWarning, match="profile.yaml: the host differs .cores 999, here") as caught:
            profile = finished.profile
        assert caught[0].filename == __file__
        assert isinstance(profile, autotune.Applied) and finished.profile is profile
        assert finished.outcome is not None and profile.config == finished.outcome.best.config

    def test_its_trials_are_a_frame(self, finished: autotune.Study) -> None:
        pandas = pytest.importorskip("pandas")
        frame = finished.trials
        assert isinstance(frame, pandas.DataFrame)
        assert frame.index.tolist() == [0, 1, 2] and set(frame["status"]) == {"complete", "pruned"}
        best = frame.loc[frame["samples_per_second"].idxmax()]
        assert best["ci95_low"] < best["samples_per_second"] < best["ci95_high"] and best["seconds"] > 0
        assert frame["batch_size"].dtype == "Int64"

    def test_its_trials_without_pandas(self, finished: autotune.Study, monkeypatch: pytest.MonkeyPatch) -> None:
        usual = builtins.__import__

        def without(name: str, *args: Any, **kwargs: Any) -> Any:
            if name == "pandas":
                raise ImportError(name)
            return usual(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without)
        rows = finished.trials
        assert isinstance(rows, list) and [row["number"] for row in rows] == [0, 1, 2]
        assert rows[0]["status"] == "complete" and rows[0]["cause"] is None

    def test_rows_have_equal_keys(self) -> None:
        one = make_trial(0, {"batch_size": 8, "num_workers": 0})
        other = make_trial(1, {"batch_size": 8, "num_workers": 1, "prefetch_factor": 2, "workload.deep": True})
        rows = trial_rows([one, other])
        assert list(rows[0]) == list(rows[1]) and rows[0]["prefetch_factor"] is None
        assert rows[1]["workload.deep"] is True and list(rows[0])[:3] == ["number", "status", "batch_size"]

    def test_its_report_is_a_page_and_a_path(self, finished: autotune.Study) -> None:
        page = finished.report()
        text = page.path.read_text()
        assert (
            os.fspath(page) == str(page) == str(finished.folder / "report.html") and "<!doctype html>" in text.lower()
        )

        class Frame(HTMLParser):
            srcdoc = ""

            def handle_starttag(self, tag: str, attrs: Any) -> None:
                self.srcdoc = dict(attrs)["srcdoc"]
                assert tag == "iframe"

        frame = Frame()
        frame.feed(page._repr_html_())
        assert frame.srcdoc == text

    def test_an_unfinished_one_tells_how_far_it_is(self, tmp_path: Path) -> None:
        shutil.copytree(STUDIES / "stopped", tmp_path / "stopped")
        study = autotune.open_study(tmp_path / "stopped")
        assert study.outcome is None and study.finding is None
        assert "the search is not finished" in repr(study)
        with pytest.raises(NoVerdictError, match="not finished") as caught:
            _ = study.profile
        assert "autotune.resume(" in (caught.value.advice or "")
        assert study.report().path.is_file()
