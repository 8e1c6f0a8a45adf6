"""The full report of a study: order of the sections, sentences, and how missing data is reported."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from autotune.base.records import (
    Config,
    DataRef,
    Failure,
    LaunchKind,
    LeftFiles,
    Outcome,
    Phase,
    StudySpec,
    Surroundings,
    Trial,
    TrialResult,
    TrialStatus,
    Value,
    Window,
)
from autotune.report import Material, report_on, to_markdown, to_terminal
from autotune.report.material import LaunchRecord
from autotune.study.request import command_of
from tests.support import make_measurement, make_outcome, make_probe, make_spec, make_standing, make_trial

FOUND = make_outcome()
BASE = FOUND.baseline.config
SPEC = StudySpec(name="resnet50-1", mark="m", created="2026-11-21T10:22:31+00:00", model="resnet50")
TITLES = [
    *("Answer", "At a glance", "Verdict", "Finalists", "What limits it", "What each knob gave", "Does it train?"),
    *("Does it hold?", "What failed", "Where the time went", "What was asked", "How quiet the machine was"),
    *("Where it holds", "Next"),
]
ADVICE = "lower --batch-size"


def launch(name: str, config: Config, rate: float, *, energy_j: float | None = None, **around: Any) -> LaunchRecord:
    """A verifying launch with six windows; every second of the baseline's was disturbed."""
    windows = tuple(
        Window(steps=4, samples=128, seconds=128 / rate, around=Surroundings(**{k: v + i for k, v in around.items()}))
        for i in range(6)
    )
    lost = tuple(
        Window(steps=4, samples=128, seconds=2.0, discarded=f"others used {1 + i}.5 cores while none was free")
        for i in range(2 if config == BASE else 0)
    )
    data = DataRef(kind="generated", path="/home/me/images", page_cache="warm")
    spec = make_spec(Path("/x") / name, config=dict(config), data=data, image_size=96)
    measured = make_measurement(rate, windows=windows, discarded=lost, energy_j=energy_j)
    return LaunchRecord(spec, TrialResult(launch=name, status=TrialStatus.COMPLETE, measurement=measured))


def failed(number: int, batch_size: int, cause: str, status: TrialStatus = TrialStatus.OOM, **result: Any) -> Trial:
    config: dict[str, Value] = {**BASE, "batch_size": batch_size}
    ended = TrialResult(launch="x", status=status, phase=Phase.BUILD, cause=cause, **result)
    return Trial(number=number, config=config, result=ended)


TRIALS = [
    make_trial(0, BASE, 30.4),
    failed(1, 512, "no memory for 800 MiB", advice=ADVICE),
    failed(2, 256, "no memory for 400 MiB", advice=ADVICE),
    failed(3, 32, "killed [red]x[/red]\nby signal 9", TrialStatus.KILLED),
    make_trial(4, FOUND.best.config, 64.0),
    failed(5, 16, "slow", TrialStatus.PRUNED, rate_seen_per_s=11.0),
    make_trial(7, FOUND.best_same_batch.config, 59.0),
    make_trial(9, FOUND.finalists[3].config, 72.0),
]
PROBE = LaunchRecord(
    make_spec(Path("/x/probe-1"), kind=LaunchKind.PROBE, config={}),
    TrialResult(launch="probe-1", status=TrialStatus.COMPLETE, probe=make_probe()),
)
LAUNCHES = [
    PROBE,
    launch("verify-00000-1", BASE, 30.0, foreign_cores=0.1),
    launch("verify-00000-2", BASE, 31.0, foreign_cores=0.1),
    launch("verify-00004-1", FOUND.best.config, 62.0, foreign_cores=0.1),
]


def material(**changes: Any) -> Material:
    whole = Material(
        name="resnet50-1",
        typed="resnet50-1",
        folder=PurePath("/home/me"),
        spec=SPEC,
        trials=TRIALS,
        outcome=FOUND,
        launches=LAUNCHES,
        spent_s=200.0,
    )
    return replace(whole, **changes)


def shown(given: Material, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(to_terminal(report_on(given)))
    return [line.rstrip() for line in console.export_text().splitlines()]


def said(**changes: Any) -> str:
    return " ".join(" ".join(shown(material(**changes), 200)).split())


def titles(**changes: Any) -> list[str]:
    return [section.title for section in report_on(material(**changes)).sections]


GPU = make_outcome(
    device="cuda:0",
    device_name="a card",
    baseline=make_standing(0, BASE, 10_612.25, halfwidth=0.00002),
    best=make_standing(4, FOUND.best.config, 25_463.36, 2.3994, halfwidth=0.00002, peak_memory_bytes=123 * 2**27),
)


@pytest.mark.parametrize("outcome", [FOUND, GPU, None], ids=["cpu", "gpu", "unfinished"])
@pytest.mark.parametrize("width", [80, 120])
def test_no_figure_is_cut_and_no_line_is_too_long(outcome: Outcome | None, width: int) -> None:
    lines = shown(material(outcome=outcome), width)
    assert all(cell_len(line) <= width for line in lines)
    assert not [line for line in lines if "…" in line]


@pytest.mark.parametrize("width", [1, 20, 40])
def test_a_narrow_terminal_gets_something(width: int) -> None:
    assert any(line.strip() for line in shown(material(), width))


def test_the_sections_come_in_the_order_in_which_a_reader_asks() -> None:
    assert titles() == TITLES
    headings = [line.split(" ──")[0] for line in shown(material(), 80) if " ──" in line]
    assert headings == TITLES
    markdown = to_markdown(report_on(material()))
    assert [line[3:] for line in markdown.splitlines() if line.startswith("## ")] == TITLES


def test_what_was_asked_is_there_as_a_command_line() -> None:
    spec = SPEC.model_copy(update={"fixed": {"compile_mode": "off"}, "allow_busy": True})
    assert f"command {command_of(spec)} " in said(spec=spec)
    assert "--fix compile_mode=off --allow-busy" in command_of(spec)


def test_what_a_script_may_have_left_is_said_with_advice() -> None:
    left = LeftFiles(folder="/home/me", names=("last.pt", "[red]a", "b"), number=7, size_bytes=3 * 2**30)
    text = said(outcome=make_outcome(left=left))
    assert (
        "7 files in /home/me (3.00 GiB) are new or changed since the search began: last.pt, [red]a, b, …. The script "
        "runs at every launch, and writes each time; --output-flag FLAG gives each launch a folder to write to and "
        "--scratch runs each in one, removed at its end."
    ) in text
    both = make_outcome(left=left, own_folders=("--output-flag", "--scratch"))
    assert "writes each time." in said(outcome=both)


def test_a_scripts_own_flags_are_part_of_what_to_type() -> None:
    flags = {"num_workers": "-j {num_workers}"}
    outcome = make_outcome(command=("python", "train.py"), flags=flags)
    assert "--map 'num_workers=-j {num_workers}' -- python train.py" in said(outcome=outcome)


def test_the_headline_says_on_what_and_with_what() -> None:
    text = said()
    assert text.startswith("resnet50 on a plain CPU, 96 px: study resnet50-1 Answer")
    assert "/home/me/images; page cache warm, all files had been read before the first launch" in text
    assert "torch 2.9.0, torchvision 0.24.0, Python 3.11.9" in text
    assert "16 trials (9 complete · 4 pruned · 3 oom) in 9 min 58 s of a budget of 10 min" in text
    assert "page cache cold" in said(outcome=make_outcome(page_cache="cold"))
    assert "came from the page cache or the disk is not known" in said(outcome=make_outcome(page_cache="unknown"))


def test_what_was_tried_of_each_knob_and_what_never_was() -> None:
    choices = {
        "precision": ["fp32", "bf16"],
        "batch_size": ["16", "32", "64", "128", "256", "512", "1024"],
        "compile_mode": ["off", "default"],
        "optimizer_impl": ["for-loop"],
    }
    text = said(choices=choices)
    tried = len({t.config["batch_size"] for t in TRIALS})
    assert f"values tried precision 2 of 2 · batch_size {tried} of 7 never varied compile_mode" in text
    # Nothing is known of a study without trials, or without its space.
    assert "never varied" not in said() and "never varied" not in said(choices=choices, trials=[], outcome=None)


def test_the_verdict_names_winner_rate_interval_and_launches() -> None:
    text = said()
    assert "The fastest is trial 4, bf16 + channels_last + batch 64: 63.4 ± 1.9 samples/s, 2.10× the baseline's" in text
    assert "30.2 ± 0.9 (95 %: 2.04 to 2.16), from 4 fresh launches of each, in turns." in text
    assert "At your own batch size (32) the fastest is trial 7" in text
    assert "was fast but wrong: the loss was not finite at step 3." in text
    more = make_outcome(baseline=make_standing(0, BASE, 30.2, launches=6))
    assert "from 4 fresh launches and 6 of the baseline, in turns." in said(outcome=more)
    once = make_standing(4, FOUND.best.config, 63.4, 2.1, launches=1, verified=False)
    text = said(outcome=make_outcome(best=once))
    assert "from the search's own launch, whose figure is too good on average" in text
    assert "1*: the search's own launch, not launched again." in text


def test_nothing_faster_is_said_first_and_no_proof_of_a_winner_is_missed() -> None:
    base = FOUND.baseline
    none = {
        "best": base,
        "best_same_batch": base,
        "finalists": (base,),
        "tie": "that is no proof",
        "ablation": (),
        "checks": (),
        "hold": None,
    }
    text = said(outcome=make_outcome(**none))
    assert "faster than the baseline, 30.2 samples/s. That is no proof. Keep what you have." in text
    left = titles(outcome=make_outcome(**none))
    assert left == [t for t in TITLES if t not in ("What each knob gave", "Does it train?", "Does it hold?")]
    assert "Verdict" in left, "it tells of those that were dropped"


def test_finalists_with_whether_they_train_and_hold() -> None:
    rows = {line.split()[0]: line for line in shown(material(), 80) if line[:5].strip().isdigit() and "GiB" in line}
    assert list(rows) == ["0", "4", "7", "9"]
    assert rows["4"].split()[-2:] == ["yes", "yes"] and "2.04–2.16" in rows["4"]
    assert rows["7"].split()[-2:] == ["yes", "-"] and rows["9"].split()[-2:] == ["no", "-"]
    assert "trial 9 out: bf16 + compile + channels_last + 2 workers" in said()
    dropped = make_outcome(dropped={7: "did not hold: 2 % of the memory stayed free"}, best_same_batch=FOUND.baseline)
    assert "did not hold: 2 % of the memory stayed free." in said(outcome=dropped)
    unknown = make_outcome(checks=(FOUND.checks[0].model_copy(update={"passed": None, "reason": "no time"}),))
    text = said(outcome=unknown)
    # Trial 9 is in bf16 as well.
    assert "?: not checked, see below." in text and "Trains, same" not in text
    loading = {**FOUND.baseline.config, "num_workers": 2, "prefetch_factor": 2}
    alike = tuple(s.model_copy(update={"config": loading}) if s.trial == 9 else s for s in FOUND.finalists)
    text = said(outcome=make_outcome(checks=unknown.checks, finalists=alike))
    assert "Trains, same: its steps compute what the baseline's do" in text
    assert "Whether the winner trains was not checked: no time." in text


def test_limits_and_knobs() -> None:
    text = said()
    assert "trial 0 (baseline) Device-bound: with a device that costs nothing" in text
    assert "4 63.4 ± 1.9 69.7 ± 1.7 not known balanced" in text
    assert "precision fp32 → bf16 1.62× 1.57–1.67" in text
    assert "batch_size 32 → 64 1.01× 0.98–1.05 not shown to matter" in text
    assert "memory_format contiguous → channels_last - - not measured: there was no time for it" in text
    workers = FOUND.ablation[0].model_copy(
        update={"knob": "num_workers", "value": 4, "baseline_value": 0, "with_it": ("prefetch_factor",)}
    )
    assert "set back together with prefetch_factor" in said(outcome=make_outcome(ablation=(workers,)))
    batch = FOUND.ablation[1]
    assert "not shown to matter; kept, as without it was no better" in said(outcome=make_outcome(ablation=(batch,)))
    once = batch.model_copy(update={"launches": 1})
    said_once = said(outcome=make_outcome(ablation=(once,)))
    assert "not shown to matter; launched once without it, too little to set it back" in said_once


def test_two_peaks_of_memory_are_told_apart() -> None:
    assert "in the launches that were timed" in said()
    held = FOUND.hold.hold if FOUND.hold else None
    assert held is not None
    same = FOUND.best.model_copy(update={"peak_memory_bytes": held.peak_bytes})
    assert "in the launches that were timed" not in said(outcome=make_outcome(best=same))
    assert "of which later steps need no more" not in said()
    tried = FOUND.hold.model_copy(update={"hold": held.model_copy(update={"first_step_bytes": 8 * 2**30})})
    told = said(outcome=make_outcome(hold=tried))
    assert "first step 8.00 GiB, of which later steps need no more than the peak" in told


def test_curves_are_drawn_in_a_terminal_and_written_out_in_markdown() -> None:
    drawn = {line.rsplit("  ", 2)[0].strip(): line for line in shown(material(), 80) if "▁" in line or "██" in line}
    assert drawn.keys() >= {"eager fp32", "trials 4 and 7"}
    assert drawn["eager fp32"].endswith("2.3 → 0.899")
    assert drawn["eager fp32"].count("▁") >= 1 and sum(drawn["eager fp32"].count(bar) for bar in "▁▂▃▄▅▆▇█") == 24
    markdown = to_markdown(report_on(material()))
    assert "* trial 9: 2.3, 2.208\n" in markdown and "▁" not in markdown
    assert "- **trial 9**: The loss was not finite at step 3." in markdown


def test_flat_and_long_curves_are_drawn_too() -> None:
    flat = FOUND.checks[0].model_copy(update={"losses": (1.0,) * 500, "reference": (1.0,) * 500})
    (line,) = [x for x in shown(material(outcome=make_outcome(checks=(flat,))), 80) if x.startswith("eager fp32")]
    assert line.count("▁") == 48 and line.endswith("1 → 1")


def test_disturbed_windows_are_counted_by_their_reason() -> None:
    text = said()
    assert "18 windows kept in 3 launches; 4 discarded (18 %)." in text
    # One reason with different figures.
    assert "others used 1.5 cores while none was free 4 8.0 s 2" in text
    assert "CPU used by others, kept windows 0.10 to 5.10 cores, median 2.60" in text
    assert "2 of the baseline ran at 30.0 to 31.0 samples/s" in text
    assert "SM clock" not in text and "energy" not in text and "alloc retries" not in text
    quiet = said(launches=[PROBE, launch("verify-00004-1", FOUND.best.config, 62.0)])
    assert "6 windows in 1 launch; none had to be discarded. What others did on the machine meanwhile was not" in quiet
    assert "How quiet the machine was" not in titles(launches=[PROBE])


def test_launches_that_never_settled_are_counted_by_their_reason() -> None:
    def launch(number: int, why: str) -> LaunchRecord:
        odd = make_measurement(62.0, settled=False, unsettled=why)
        result = TrialResult(launch=f"{number:05d}", status=TrialStatus.COMPLETE, measurement=odd)
        return LaunchRecord(make_spec(Path(f"/x/{number:05d}"), number=number), result)

    few = [launch(n, f"{n} steps are too few to tell whether their times had settled") for n in range(3, 10)]
    text = said(launches=[*few, launch(12, "the step times went on changing")])
    # One reason with different figures.
    assert "3 steps are too few to tell whether their times had settled 7 trial 3, trial 4, trial 5" in text
    assert "and 3 more" in text and "the step times went on changing 1 trial 12" in text


def test_a_card_tells_clocks_temperature_power_and_energy() -> None:
    card = {"sm_clock_mhz": 1965, "temperature_c": 40, "power_w": 480.0, "foreign_processes": 0}
    launches = [
        launch("verify-00000-1", BASE, 30.0, energy_j=768.0, clocks_event_reasons=0x4, **card),
        launch("verify-00004-1", FOUND.best.config, 62.0, energy_j=384.0, clocks_event_reasons=0x1, **card),
    ]
    text = said(launches=launches)
    assert "SM clock 1,965 to 1,970 MHz, median 1,968" in text
    assert "temperature 40 to 45 °C" in text and "power 480 to 485 W" in text
    # 0x4 to 0x9 and 0x1 to 0x6: of these 4 to 7 hold the power cap's bit. 8 and 9 hold one that means nothing alone.
    assert "clocks held down SW power cap in 7 of 12 kept windows temperature" in text
    assert "energy the baseline 1 J a sample, the winner 0.5 J a sample" in text


def test_launches_of_a_hot_card_are_named() -> None:
    hot = launch("verify-00004-1", FOUND.best.config, 62.0, clocks_event_reasons=0x20, foreign_sm_percent=0)
    text = said(launches=[launch("verify-00000-1", BASE, 30.0, clocks_event_reasons=0x10), hot])
    assert "SW thermal slowdown lasted through 1 of 2 launches, whose rates are therefore those of a hot card: " in text
    assert "hot card: verify-00004-1." in text and "SW thermal slowdown in 6 of 12 kept windows" in text
    assert "SMs used by others, kept windows 0 to 5 %" in text
    assert "lasted through all launches, whose rates are therefore those of a hot card." in said(launches=[hot])


def test_failures_are_told_by_status_with_cause_and_advice() -> None:
    text = said()
    assert "2 oom · 1 killed." in text
    # Causes that differ in their figures are one, told by the smallest batch.
    assert "oom ×2 trials 1 and 2, in build, from batch 256: no memory for 400 MiB. Lower --batch-size." in text
    assert "killed ×1 trial 3, in build: killed [red]x[/red] by signal 9." in text
    assert "1 trial was ended early for being slow." in text
    assert "Nothing failed." in said(trials=TRIALS[:1])
    busy = failed(1, 32, "other processes kept using 1.6 of 2 cores", TrialStatus.INTERRUPTED)
    assert "interrupted ×1 trial 1, in build: other processes kept using" in said(trials=[TRIALS[0], busy])
    other = TrialResult(launch="hold-00004", status=TrialStatus.OOM, phase=Phase.MEASURE, cause="no memory")
    launches = [LaunchRecord(make_spec(Path("/x/hold-00004"), kind=LaunchKind.HOLD), other)]
    assert "oom ×1 hold-00004, in measure: no memory." in said(trials=TRIALS[:1], launches=launches)
    many = [failed(i, 8, "no memory " + "x" * i) for i in range(1, 8)]
    assert "oom ×3 other causes; `autotune show` has them all" in said(trials=[TRIALS[0], *many])


def test_the_ledger_adds_up() -> None:
    lines = shown(material(), 80)
    (total,) = [line for line in lines if line.startswith("in all")]
    assert total.split() == ["in", "all", "30", "598.0", "70.0", "72.0", "84.0", "311.0", "61.0", "52", "%"]
    assert "| **in all** | **30** | **598.0** |" in to_markdown(report_on(material()))
    text = said()
    assert "Of the trials' time that was not compiling, 61 % lay inside kept windows." in text
    assert "Waiting for a quiet device took another 31 s" in said(outcome=make_outcome(wait_s=31.0))


def test_a_search_that_an_error_ended_says_which_instead_of_how_to_go_on() -> None:
    failure = Failure(message="the baseline ended as diverged", advice="look at the learning rate.", exit_code=4)
    text = said(outcome=None, failure=failure)
    assert "The search ended with an error, so nothing is promised: The baseline ended as diverged." in text
    assert "Look at the learning rate." in text and "This study is not finished" not in text


def test_of_an_unfinished_study_what_there_is() -> None:
    given = material(outcome=None)
    assert titles(outcome=None) == [
        *("Answer", "At a glance", "The best so far", "What failed", "What was asked", "How quiet the machine was"),
        "Next",
    ]
    text = said(outcome=None)
    assert "This study is not finished, so nothing is promised." in text
    assert "autotune resume resnet50-1" in text
    assert "not finished; 8 trials, 3 min 20 s used of a budget of 10 min" in text
    lines = shown(given, 80)
    begin = next(i for i, line in enumerate(lines) if line.startswith("The best so far ─"))
    rows = [line for line in lines[begin:] if line.endswith(" MiB")]
    assert [line.split()[0] for line in rows] == ["9", "4", "7", "0"]
    nothing = said(outcome=None, trials=[], launches=[], spent_s=None)
    assert "No trial has ended yet." in nothing and "not finished; 0 trials of a budget" in nothing
    assert titles(outcome=None, trials=[], launches=[]) == ["Answer", "What was asked", "Next"]
    broken = [failed(0, 32, "no memory"), make_trial(1, FOUND.best.config, 60.0)]
    assert "60.0 ± 0.5" in said(outcome=None, trials=broken)


def test_an_outcome_of_an_older_version_is_told_without_what_it_lacks() -> None:
    gone = dict.fromkeys(("finalists", "bottlenecks", "checks", "ablation", "ledger"), ())
    old = make_outcome(**gone, dropped={}, hold=None, page_cache=None)
    assert titles(outcome=old, launches=[]) == [t for t in TITLES if t != "How quiet the machine was"]
    text = said(outcome=old, launches=[])
    assert text.count("It was not checked.") == 2 and "It was not measured." in text
    assert "The ceilings were not measured. The winner waits for its loader 4 % of the time." in text
    assert "9 min 58 s of searching, of which 5 min 11 s inside kept windows." in text
