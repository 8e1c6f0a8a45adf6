"""The sentences under the table at the end of a search, for a winner that was checked."""

from __future__ import annotations

import io
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from autotune.base.records import Finding, HoldVerdict, LedgerRow, Limit, Trial, TrialResult, TrialStatus
from autotune.report import best_table
from autotune.search.outcome import why_no_more_workers
from autotune.space import SpaceRequest, build_space
from tests.support import make_host, make_outcome, make_probe, make_standing, make_trial

FOUND = make_outcome()
TRIALS = [
    make_trial(s.trial, s.config, s.samples_per_second * 1.02)
    for s in (FOUND.baseline, FOUND.best, FOUND.best_same_batch, FOUND.finalists[3])
]


def lines_of(width: int = 80, trials: list[Trial] = TRIALS, **changes: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(best_table(make_outcome(**changes), trials, PurePath("/home/me")))
    return [line.rstrip() for line in console.export_text().splitlines()]


def said(**changes: Any) -> str:
    return " ".join(" ".join(lines_of(120, **changes)).split())


@pytest.mark.parametrize("width", [80, 120])
def test_every_finalist_that_is_not_out_has_its_verified_row(width: int) -> None:
    lines = lines_of(width)
    assert all(cell_len(line) <= width for line in lines)
    verified = [line for line in lines if "verified ×4" in line]
    assert [line.split()[0] for line in verified] == ["0", "4", "7"]
    assert "63.4 ± 1.9" in verified[1] and "2.10×" in verified[1]


def test_who_was_dropped_is_told_in_a_line_and_has_no_row() -> None:
    lines = lines_of(120)
    assert not [line for line in lines if line.split()[:1] == ["9"]]
    told = (
        "Trial 9 (bf16 + compile + channels_last + 2 workers, 72.4 ± 0.6 samples/s in the search) was fast but wrong: "
    )
    assert f"{told}the loss was not finite at step 3." in said()
    gone = said(dropped={9: "ended as oom when it was launched again: no memory"})
    assert "in the search) ended as oom when it was launched again: no memory." in gone
    assert "Trial 9 is out: anything." in said(trials=[], dropped={9: "anything"})


def test_what_speaks_for_the_winner_stands_under_it() -> None:
    text = said()
    assert (
        "The winner trains as eager fp32 does. The winner holds: 88 % of the memory stays free, 8 % are wanted." in text
    )
    assert "The winner is balanced: 24 % of a step is waiting for the loader." in text
    assert (
        "What gave it: bf16 1.62× (1.57–1.67); not shown to matter, but no better without: batch 64; "
        "gain not measured: channels_last." in text
    )


def test_a_useless_knob_that_is_kept_says_why() -> None:
    once = tuple(p.model_copy(update={"launches": 1}) for p in FOUND.ablation)
    text = said(ablation=once)
    assert "not shown to matter by one launch without, too little to set back: batch 64" in text


def test_what_was_not_checked_is_said_to_be_so() -> None:
    unknown = FOUND.checks[0].model_copy(update={"passed": None, "reason": "there was no time to check it"})
    hold = HoldVerdict(trial=4, passed=None, reason="there was no time to check it", headroom_wanted=0.08)
    text = said(checks=(unknown,), hold=hold)
    assert "Whether the winner trains was not checked: there was no time to check it." in text
    assert "Whether the winner holds was not checked: there was no time to check it." in text


def test_what_others_cost_is_told_with_what_to_do_about_it() -> None:
    lost = TrialResult(
        launch="00012",
        status=TrialStatus.INTERRUPTED,
        transient=True,
        cause="other processes kept using 1.0 of 2 cores; only 1 of 6 windows undisturbed in 20 s",
        advice="end what else runs.",
    )
    trials = [*TRIALS, Trial(number=12, config=TRIALS[0].config, result=lost)]
    assert "1 trial given up because other processes kept using 1.0 of 2 cores. End what else runs." in said(
        trials=trials
    )
    # A Ctrl-C is nobody's disturbance.
    stopped = lost.model_copy(update={"transient": False})
    trials[-1] = trials[-1].model_copy(update={"result": stopped})
    assert "given up" not in said(trials=trials)


def test_figures_of_a_busy_machine_say_so() -> None:
    assert "Measured with --allow-busy" in said(allow_busy=True) and "--allow-busy" not in said()
    assert "may have come from the disk" in said(page_cache="cold") and "the disk" not in said()


def test_a_tie_is_told_once() -> None:
    tie = "Trial 7 ran at 1.010× trial 4 (95 %: 0.980 to 1.040): that is no proof of being faster"
    assert said(tie=tie).count("that is no proof of being faster.") == 1
    baseline = FOUND.baseline
    nobody = {"best": baseline, "best_same_batch": baseline, "ablation": (), "hold": None}
    text = said(tie=tie, finalists=(baseline,), **nobody)
    assert text.count("that is no proof of being faster. Keep what you have.") == 1


def test_where_the_time_went_is_one_sentence() -> None:
    shares = "52 % in kept windows, 14 % warming up, 12 % compiling and first steps, 12 % starting, 7 % in the rest of"
    assert f"was found. 9 min 58 s in all: {shares} launches, 3 % between launches." in said()
    alone = said(ledger=(LedgerRow(purpose="searching", launches=1, seconds=10.0, rest_s=10.0),))
    assert "10 s in all: 0 % in kept windows, 100 % in the rest of launches." in alone
    assert "Waiting for a quiet device took 31 s more." in said(wait_s=31.0)


def test_the_report_is_one_of_the_next_commands() -> None:
    assert "  autotune report resnet50-1" in lines_of()


def test_nothing_that_the_user_has_already_is_handed_over_as_a_find() -> None:
    kept = said(best=FOUND.baseline, best_same_batch=FOUND.baseline, finding=Finding.KEEP)
    assert "Profile of the baseline: " in kept and "autotune train" not in kept and "autotune show resnet50-1" in kept


def test_a_winner_made_from_a_trial_is_told_from_the_trial() -> None:
    made = {**FOUND.best.config, "memory_format": "contiguous"}
    simpler = make_standing(4, made, 63.0, 2.09)
    lines = lines_of(120, best=simpler, finalists=(*FOUND.finalists, simpler))
    rows = [line for line in lines if "verified" in line and "×4" in line]
    assert [line.split()[0] for line in rows] == ["0", "4′", "4", "7"]


def test_an_outcome_of_an_older_version_says_less() -> None:
    gone = dict.fromkeys(("finalists", "bottlenecks", "checks", "ablation", "ledger"), ())
    text = said(**gone, dropped={}, hold=None)
    assert "9 min 58 s of searching, of which 5 min 11 s inside kept windows." in text
    assert not [word for word in ("fast but wrong", "holds", "What gave it") if word in text]


def test_a_training_that_waits_for_its_loader_says_why_more_workers_were_not_tried() -> None:
    why = "the data set reads on in the open file 'a.bin', and workers would share its position"
    waiting = FOUND.bottlenecks[1].model_copy(update={"limit": Limit.LOADER, "sentence": "97 % of a step is waiting."})
    told = said(bottlenecks=(waiting,), no_more_workers=why)
    assert f"97 % of a step is waiting. More workers were not tried: {why}." in told
    # Of what waits for the device, workers are none of its troubles.
    assert why not in said(no_more_workers=why)


@pytest.mark.parametrize(("own", "reasons"), [(0, {"*": "it reads on"}), (1, {"*": "it reads on"}), (1, {})])
def test_what_a_data_set_was_seen_to_do_is_why_there_are_no_more_workers(own: int, reasons: dict[str, str]) -> None:
    probe = make_probe(own={"num_workers": own, "batch_size": 32}, outside={"num_workers": reasons})
    setup: Any = SimpleNamespace(probe=probe, space=build_space(probe, make_host(), SpaceRequest()))
    assert why_no_more_workers(setup) == reasons.get("*")
