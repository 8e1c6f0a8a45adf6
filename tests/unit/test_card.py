"""The command for a card: what it plans, what it appends, and a part that fails. No part is run here but small ones."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.card import command, inside
from benchmarks.card.parts import BY_NAME, PARTS, Part, in_order, next_part, planned
from benchmarks.card.results import Result, append, last_of_each, page, read, without_paths
from benchmarks.card.stage import Skipped, Stage
from benchmarks.card.wheels import told, wheels

ROOT = Path(__file__).parent.parent.parent


def part(name, estimate_s, *, elastic=False):
    return Part(name, "module.function", "a part", estimate_s, estimate_s / 10, elastic=elastic)


SHORT, LONG, REST = part("short", 50), part("long", 400), part("rest", 3600, elastic=True)


@pytest.mark.parametrize(
    ("left_s", "names"),
    [
        (40, []),
        (59, ["short"]),
        (100, ["short"]),
        (110, ["short", "rest"]),
        (450, ["short", "long"]),
        (520, ["short", "long", "rest"]),
    ],
)
def test_parts_are_planned_in_order_as_far_as_they_fit(left_s, names):
    assert [p.name for p in planned([SHORT, LONG, REST], left_s, rehearsal=False)] == names


def test_a_part_that_does_not_fit_lets_later_ones_pass():
    assert next_part([LONG, SHORT], 100, rehearsal=False) is SHORT
    assert next_part([LONG, SHORT], 100, rehearsal=True) is LONG


def test_a_part_waits_for_the_one_that_leaves_what_it_needs():
    needy = Part("needy", "x.y", "", 10, 1, after="long")
    assert next_part([LONG, needy, SHORT], 100, rehearsal=False) is SHORT
    assert [p.name for p in planned([LONG, needy], 500, rehearsal=False)] == ["long", "needy"]
    assert next_part([needy], 100, rehearsal=False) is needy, "asked for alone, or after a call in which the other ran"
    assert all(part.after is None or part.after in BY_NAME for part in PARTS)


def test_a_part_is_given_twice_its_estimate_and_the_surface_all_there_is():
    assert LONG.limit_s(1000, rehearsal=False) == 800
    assert LONG.limit_s(500, rehearsal=False) == 500
    assert SHORT.limit_s(1000, rehearsal=True) == 60
    assert REST.limit_s(500, rehearsal=False) == 500


def test_without_names_what_failed_comes_last_and_what_is_done_is_left_out():
    status = {"facts": "ok", "doctor": "failed", "surface": "ok"}.get
    names = [p.name for p in in_order([], status)]
    assert names[0] == "matrix" and names[-2:] == ["doctor", "surface"] and "facts" not in names
    assert [p.name for p in in_order(["kill", "facts", "kill"], status)] == ["kill", "facts"]


def test_every_part_has_its_function():
    """Read from the source, because importing the parts is for their own process."""
    for one in PARTS:
        module, _, function = one.function.partition(".")
        assert f"\ndef {function}(stage: Stage) -> None:" in (ROOT / "benchmarks/card" / f"{module}.py").read_text()
    assert len(BY_NAME) == len(PARTS)


def test_listing_needs_no_torch():
    program = "import sys; from benchmarks.card.command import main; main(['--list']); sys.exit('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[0] for line in ended.stdout.splitlines()] == [p.name for p in PARTS]


def test_the_wheels_are_what_autotune_needs_and_a_bare_machine_lacks():
    found = wheels()
    names = {name.partition("==")[0] for name in found}
    assert {"optuna", "pydantic", "pydantic-core", "sqlalchemy", "scipy", "typer", "pytest"} <= names
    assert not names & {"torch", "torchvision", "numpy", "pillow", "rich", "jinja2", "nvidia-ml-py", "pip", "triton"}
    assert "://" not in told(found) and "index-url" not in told(found)


@pytest.fixture
def call(tmp_path):
    (tmp_path / "work").mkdir()
    return command.Call(tmp_path / "out" / "card-x.jsonl", tmp_path / "work", "a machine", "abc", None, rehearsal=True)


def test_every_part_appends_a_line_and_a_failure_ends_nothing(call):
    said = []
    ends = iter([("failed", "Traceback\nValueError: no"), ("ok", None)])

    def run(call, part, limit_s):
        status, reason = next(ends)
        figures = {"rate": 3.0, "rows": [{"a": 1, "b": None}, {"a": "x|y"}]}
        return Result(part.name, status, 1.0, figures, reason, call.machine, call.commit, "now", rehearsal=True)

    todo = [BY_NAME["facts"], BY_NAME["kill"], BY_NAME["surface"]]
    assert command.run_all(call, todo, time.monotonic() + 65, said.append, run) == 1
    assert [(r.part, r.status) for r in read(call.file)] == [("facts", "failed"), ("kill", "ok")]
    assert any("left out" in line and "surface" in line for line in said)
    assert any(line.endswith("ValueError: no") for line in said)
    written = call.file.with_suffix(".md").read_text()
    assert "| a |\n" in written and "x\\|y" in written and "failed: Traceback ValueError: no" in written


def test_a_call_knows_of_earlier_ones_with_another_folder_of_results(call, tmp_path):
    call.append(Result("facts", "ok", 1.0, commit="abc", time="2026-01-01T00:00:00"))
    later = replace(call, file=tmp_path / "emptied" / call.file.name)
    later.append(Result("kill", "failed", 2.0, commit="abc", time="2026-01-01T00:01:00"))
    assert [r.part for r in read(later.file)] == ["kill"]
    assert [r.part for r in later.results()] == ["facts", "kill"]
    assert "| facts | ok |" in later.file.with_suffix(".md").read_text()
    assert [r.part for r in call.results()] == ["facts", "kill"]


def test_what_needs_a_part_that_failed_is_left_out(call):
    said = []

    def run(call, part, limit_s):
        return Result(part.name, "failed", 1.0, {}, "no", call.machine, call.commit, "now", rehearsal=True)

    todo = [BY_NAME["search-synthetic"], BY_NAME["promise"], BY_NAME["facts"]]
    command.run_all(call, todo, time.monotonic() + 3600, said.append, run)
    assert [r.part for r in read(call.file)] == ["search-synthetic", "facts"]
    assert "left out, because they need search-synthetic: promise" in said


def test_the_page_has_the_last_result_of_each_part(tmp_path):
    file = tmp_path / "card.jsonl"
    for seconds, status in ((1.0, "ok"), (2.0, "failed")):
        append(file, Result("kill", status, seconds))
    append(file, Result("facts", "ok", 3.0))
    file.write_text(file.read_text() + '{"part": "kill", "st')
    last = last_of_each(read(file))
    assert [(r.part, r.status) for r in last.values()] == [("facts", "ok"), ("kill", "failed")]
    assert "| kill | failed | 2 |" in page(read(file), "a card")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/home/someone/project/x.py: no", "…/x.py: no"),
        ('File "/root/a-b/c.py", line 3', 'File "…/c.py", line 3'),
        ("~/.cache/autotune/data", "…/data"),
        ("/dev/shm/torch_1", "/dev/shm/torch_1"),
        ("512 samples/s and 1/2", "512 samples/s and 1/2"),
        ("on GPU-12345678-aaaa-bbbb", "on GPU-…"),
    ],
)
def test_results_hold_no_paths_and_no_uuids(text, left):
    assert without_paths({"one": [text]}) == {"one": [left]}


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ValueError("the card is gone"), "failed", "ValueError: the card is gone"),
        (SystemExit("a launch measured nothing"), "failed", "SystemExit: a launch measured nothing"),
        (Skipped("no pytest"), "skipped", "no pytest"),
    ],
)
def test_how_a_part_ends_is_reported_with_what_it_noted(call, error, status, reason):
    stage = Stage(work=call.work, out=call.work, stem="card-x", rehearsal=True, left_s=9.0, uuid=None)

    def run():
        stage.note(seen=1)
        raise error

    told = inside.ended(run)
    assert told["status"] == status and told["reason"].strip().endswith(reason)
    assert json.loads((call.work / "figures.json").read_text()) == {"seen": 1}


def test_a_part_that_does_not_end_is_ended_and_keeps_its_figures(call, monkeypatch):
    program = (
        "import sys, time, json; a = json.loads(sys.argv[-1]);"
        "open(a['work'] + '/figures.json', 'w').write('{\"seen\": 2}'); time.sleep(1000)"
    )
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda words, **options: real([words[0], "-c", program, words[-1]], **options)
    )
    result = command.run_part(call, BY_NAME["kill"], command.TO_END_S + 1.0)
    assert (result.status, result.figures) == ("failed", {"seen": 2})
    assert "no report" in result.reason
