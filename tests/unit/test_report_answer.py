"""The answer of a study, and the short report that has little besides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath
from typing import Any

import pytest

from autotune.base.records import Edge, Failure, Finding, KnobPart
from autotune.report import Material, headline_of, report_on, short_report_on, to_html, to_json, to_markdown, to_text
from autotune.report.full_report import answer_of
from autotune.report.sentences import edge_lines
from tests.support import make_outcome, make_standing, make_study_spec, make_trial

FOUND = make_outcome()
BASE = FOUND.baseline.config
TRIALS = [make_trial(s.trial, s.config, s.samples_per_second) for s in FOUND.finalists]


def study(**changes: Any) -> Material:
    whole = Material("resnet50-1", "resnet50-1", PurePath("/home/me"), make_study_spec("resnet50-1"), TRIALS, FOUND)
    return replace(whole, **changes)


def test_the_headline_is_the_answer() -> None:
    assert headline_of(FOUND) == "2.10× faster (2.04–2.16): 63.4 instead of 30.2 samples/s; of this bf16 1.62×."
    # A knob that was not shown to matter is not named, nor one that was set back.
    back = KnobPart(knob="num_workers", value=4, baseline_value=0, gain=(1.5, 1.4, 1.6))
    assert headline_of(make_outcome(ablation=(back,))).endswith("63.4 instead of 30.2 samples/s.")
    assert headline_of(make_outcome(objective="energy")).startswith("Better by the objective energy, at 2.10× the rate")
    keep = make_outcome(finding=Finding.KEEP, best=FOUND.baseline, best_same_batch=FOUND.baseline)
    assert headline_of(keep) == "No configuration was shown to be faster than the baseline, 30.2 samples/s."
    leaner = keep.model_copy(update={"objective": "memory_thrift"})
    assert headline_of(leaner).startswith(
        "No configuration was shown to be better than the baseline by the objective memory_thrift, "
    )
    # The larger batch may be faster, the own batch is.
    unsure = make_standing(4, FOUND.best.config, 63.4, 2.1, halfwidth=1.0)
    assert headline_of(make_outcome(best=unsure)).startswith("1.95× faster")


def test_what_it_saves_what_to_paste_and_what_limits() -> None:
    answer = answer_of(study(spec=make_study_spec(epochs=90, price_per_hour=2.5)))
    rows = dict(answer.rows)
    assert list(rows) == ["how", "saves", "costs", "checked", "limit now", "changes", "at batch 32", "each knob"]
    assert rows["how"] == "bf16 + channels_last + batch 64" and "balanced" in rows["limit now"]
    assert rows["at batch 32"] == "1.95× (1.89–2.01): 58.9 samples/s, as trial 7."
    assert answer.shell == ("autotune train --profile studies/resnet50-1/profile.yaml --model resnet50",)
    assert len(answer.python) == 3 and "load_profile('studies/resnet50-1/profile.yaml')" in answer.python[1]
    # A script stays as it is.
    script = answer_of(study(outcome=make_outcome(command=("python", "train.py"))))
    assert script.python == () and script.shell[0].startswith("autotune run --profile ")


KEEP = make_outcome(finding=Finding.KEEP, best=FOUND.baseline, best_same_batch=FOUND.baseline, ablation=())
OPEN = make_outcome(
    finding=Finding.OPEN, because="others used the machine", advice="wait.", profile=None, again="autotune search"
)
ENDED = Failure(message="the baseline ended as diverged", advice="look at the learning rate.", exit_code=4)
STUDIES = {
    "faster": ({}, "2.10× faster"),
    "keep": ({"outcome": KEEP}, "No configuration was shown to be faster"),
    "open": ({"outcome": OPEN}, "No verdict, and no profile."),
    "failed": ({"outcome": None, "failure": ENDED}, "The search ended with an error, so nothing is promised"),
    "unfinished": ({"outcome": None}, "This study is not finished, so nothing is promised."),
    "begun": ({"outcome": None, "trials": []}, "This study is not finished, so nothing is promised."),
}


@pytest.mark.parametrize("name", STUDIES)
def test_every_report_begins_with_its_answer_in_every_form(name: str) -> None:
    changes, begins = STUDIES[name]
    given = study(**changes)
    for document in (report_on(given), short_report_on(given)):
        first = document.sections[0].parts[0]
        assert getattr(first, "strong", False) and getattr(first, "text", "").startswith(begins)
    assert f"<strong>{begins}" in to_html(report_on(given))
    assert to_json(given, report_on(given))["answer"]["headline"].startswith(begins)
    assert f"**{begins}" in to_markdown(short_report_on(given, lines=None))
    if name in ("keep", "open"):
        assert answer_of(given).python == (), "there is nothing to apply"


@pytest.mark.parametrize("name", STUDIES)
def test_on_a_terminal_the_short_report_is_one_screen(name: str) -> None:
    long = "x" * 300
    changes, _ = STUDIES[name]
    # However much there is to say. What the winner changes is the last to go.
    for spec in (make_study_spec(), make_study_spec(epochs=90, price_per_hour=3.0, model=long)):
        for width in (80, 100):
            document = short_report_on(study(**{"spec": spec, **changes}), width=width)
            lines = to_text(document, width).splitlines()
            assert len(lines) <= 24
            assert name != "faster" or any(line.startswith("changes ") for line in lines)
            assert all(len(line) <= width for line in lines if "autotune " not in line and long not in line)
    assert len(to_markdown(short_report_on(study(**changes), lines=None)).splitlines()) <= 30


def test_what_was_asked_stays_where_there_is_little_room() -> None:
    def names(**asked: Any) -> list[str]:
        given = study(spec=make_study_spec(**asked))
        lines = to_text(short_report_on(given, lines=18), 100).splitlines()
        return [line.split("  ")[0] for line in lines[10:-3]]

    kept, kept_asked = names(), names(epochs=7, price_per_hour=2.5)
    assert "checked" in kept and "saves" not in kept and "saves" in kept_asked and "checked" not in kept_asked
    assert "changes" in kept and "changes" in kept_asked


def test_figures_are_those_of_the_study() -> None:
    spec = make_study_spec(samples=10**9, price_per_hour=2.0)
    training = to_json(study(spec=spec), report_on(study(spec=spec)))["training"]
    best = FOUND.best
    assert training["best_s"] == pytest.approx(best.startup_s + best.compile_s + 1e9 / best.samples_per_second)
    assert training["price_per_hour"] == 2.0 and training["samples"] == 10**9


def test_what_is_checked_is_said_of_the_configuration_that_is_promised() -> None:
    """Only the one with the user's own batch was shown to be faster, and memory is held for the winner alone."""
    best = make_standing(4, FOUND.best.config, 63.4, 2.1, halfwidth=1.0)
    outcome = make_outcome(best=best)
    rows = dict(answer_of(study(outcome=outcome)).rows)
    assert rows["how"].startswith("bf16") and "batch" not in rows["how"]
    assert "trains as" in rows["checked"] and "memory" not in rows["checked"] and "limit now" not in rows
    whole = dict(answer_of(study()).rows)
    assert "memory" in whole["checked"] and "limit now" in whole


def test_a_value_at_the_end_of_its_range_keeps_its_unit() -> None:
    edge = Edge(
        knob="ddp_bucket_cap_mb", value=50, beyond=(100,), command="autotune search --set ddp_bucket_cap_mb=50,100"
    )
    assert edge_lines(make_outcome(edges=(edge,)))[0].startswith("Buckets of 50 MiB is the most that was offered")
