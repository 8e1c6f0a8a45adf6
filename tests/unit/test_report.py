"""The table and the sentences at the end of a search, and the tables of trials, studies and choices."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from autotune.base.records import (
    BreakEven,
    Finding,
    Host,
    Outcome,
    Phase,
    Probe,
    Standing,
    Trial,
    TrialResult,
    TrialStatus,
    Value,
    Window,
)
from autotune.report import StudyRow, best_table, listing, space_table, studies_table, trials_table
from autotune.space import Choice, Space, SpaceRequest, build_space, canonical
from autotune.space.formatting import describe
from tests.support import PLAIN, make_host, make_measurement, make_probe, make_standing, make_trial

GIB = 2**30
BASE: dict[str, Value] = {**PLAIN, "optimizer_impl": "for-loop", "intra_op_threads": 2}
FAST: dict[str, Value] = {"precision": "bf16", "memory_format": "channels_last"}
LOADER: dict[str, Value] = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}


def complete(number: int, change: dict[str, Value], rate: float, **result: Any) -> Trial:
    config = canonical({**BASE, **change})
    measurement = make_measurement(
        rate,
        batch_size=int(config["batch_size"]),
        ci95_per_s=(rate * 0.98, rate * 1.02),
        epoch_samples=1_281_167,
        peak_allocated_bytes=int(1.25 * GIB),
    )
    return make_trial(number, config, rate, measurement=measurement, wall_s=83.0, **result)


def failed(number: int, change: dict[str, Value], status: TrialStatus, **result: Any) -> Trial:
    ended = TrialResult(launch="x", status=status, phase=Phase.COMPILE, wall_s=9.4, **result)
    return Trial(number=number, config=canonical({**BASE, **change}), result=ended)


def standing(trial: Trial, rate: float, speedup: float, halfwidth: float = 0.03, launches: int = 3) -> Standing:
    return make_standing(
        trial.number,
        trial.config,
        rate,
        speedup,
        launches=launches,
        verified=launches > 1,
        ci95=(rate - 1.4, rate + 1.4),
        speedup_ci95=(speedup - halfwidth, speedup + halfwidth),
        peak_memory_bytes=2 * GIB,
    )


TRIALS = [
    complete(0, {}, 30.1),
    complete(1, FAST, 60.9),
    complete(2, {**FAST, **LOADER, "batch_size": 64}, 62.6),
    failed(3, {"batch_size": 512}, TrialStatus.OOM, cause="no memory", peak_bytes=4 * GIB),
    failed(4, {"batch_size": 128}, TrialStatus.OOM, cause="no memory", peak_bytes=3 * GIB),
    failed(5, LOADER, TrialStatus.LOADER_WORKER_DIED, cause="worker [red]1[/red]\x1b[2J\nwas killed"),
    failed(6, {"intra_op_threads": 1}, TrialStatus.PRUNED, cause="slow", rate_seen_per_s=14.2),
    *(complete(10 + i, {"batch_size": 16, "num_workers": i}, 20.0 + i) for i in range(6)),
]


def outcome(**change: Any) -> Outcome:
    fields: dict[str, Any] = {
        "study": "resnet50-1",
        "state": "done",
        "model": "resnet50",
        "profile": "/home/me/studies/resnet50-1/profile.yaml",
        "objective": "throughput",
        "device": "cpu",
        "device_name": "EPYC",
        "image_size": 96,
        "memory_is": "host",
        "baseline": standing(TRIALS[0], 30.2, 1.0, 0.0),
        "best": standing(TRIALS[2], 63.4, 2.1),
        "best_same_batch": standing(TRIALS[1], 61.4, 2.03),
        "trials": {"complete": 9, "oom": 2, "loader_worker_died": 1, "pruned": 1},
        "elapsed_s": 598.0,
        "measured_s": 221.0,
        "data_s": 96.0,
        "stopped": "the budget is used up",
    }
    return Outcome(**{**fields, **change})


def shown(renderable: RenderableType, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(renderable, crop=False)
    return [line.rstrip() for line in console.export_text().splitlines()]


def sentence(lines: Sequence[str]) -> str:
    return " ".join(" ".join(lines).split())


def row(lines: Sequence[str], number: int) -> str:
    return next(line for line in lines if line.split()[:1] == [str(number)])


def test_configurations_that_differ_are_described_differently(probe: Probe, host: Host) -> None:
    space = build_space(probe, host, SpaceRequest())
    grid = list(space.grid())
    assert len({describe(config, space.baseline) for config in grid}) == len(grid) > 1000


@pytest.mark.parametrize("width", [80, 120])
def test_the_best_are_shown_against_the_baseline_with_whole_figures(width: int) -> None:
    lines = shown(best_table(outcome(), TRIALS), width)
    assert all(cell_len(line) <= width for line in lines if "/" not in line)
    baseline, best, single = row(lines, 0), row(lines, 2), row(lines, 15)
    assert "baseline: fp32" in baseline
    assert all(part in baseline for part in ("30.2 ± 1.4", "1.00×", "2.00 GiB", "verified ×3"))
    # The verified figures, not the trial's 62.6.
    assert all(part in best for part in ("63.4 ± 1.4", "2.10×", "verified ×3"))
    assert all(part in single for part in ("25.0 ± 0.5", "1.25 GiB", "complete"))
    # Its launch was at another moment than the baseline's.
    assert "×" not in single
    # The baseline and five more, best first, whatever the number of complete trials.
    assert [int(line.split()[0]) for line in lines if "complete" in line and "±" in line] == [15, 14, 13]


def test_of_each_failure_the_smallest_batch_is_shown() -> None:
    lines = shown(best_table(outcome(), TRIALS), 120)
    oom = row(lines, 4)
    assert "batch 128" in oom
    assert "3.00 GiB" in oom
    assert oom.endswith("oom")
    assert not any("batch 512" in line for line in lines)
    assert not any("1 thread" in line for line in lines)  # pruned is slow, not broken
    assert "loader_worker_" in row(lines, 5)


def test_a_single_launch_is_not_called_verified() -> None:
    once = {"baseline": standing(TRIALS[0], 30.2, 1.0, launches=1)}
    once |= {name: standing(TRIALS[1], 61.4, 2.03, launches=1) for name in ("best", "best_same_batch")}
    assert "verified" not in sentence(shown(best_table(outcome(**once), TRIALS)))


def test_two_winners_and_what_the_batch_changes() -> None:
    said = sentence(shown(best_table(outcome(), TRIALS)))
    assert "Best at your own batch size (32): bf16 + channels_last, 61.4 ± 1.4 samples/s, 2.03× the baseline" in said
    assert "Best overall: bf16 + channels_last + 2 workers" in said
    assert "2.10× the baseline (95 %: 2.07 to 2.13)" in said
    assert "an epoch is 20,019 steps instead of 40,037" in said
    assert "makes 2× fewer updates. The learning rate usually follows: 2× in proportion (SGD) or 1.41×" in said


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (0.1, 0.1, "The learning rate of 0.1 usually follows: 0.2 in proportion (SGD) or 0.141 with the square root"),
        (0.1, 0.2, "The workload scales its learning rate itself: 0.2 instead of 0.1."),
    ],
)
def test_learning_rates_are_numbers_where_they_are_known(before: float, now: float, told: str) -> None:
    trials = []
    for trial in TRIALS:
        found = trial.result.measurement
        rate = now if trial.config.get("batch_size") != 32 else before
        slower = found and found.model_copy(update={"learning_rate": rate})
        result = trial.result.model_copy(update={"measurement": slower})
        trials.append(trial.model_copy(update={"result": result}))
    assert told in sentence(shown(best_table(outcome(), trials)))


def test_a_smaller_batch_makes_more_updates() -> None:
    small = complete(2, {**FAST, "batch_size": 16}, 62.6)
    said = sentence(shown(best_table(outcome(best=standing(small, 63.4, 2.1)), [])))
    assert "Batch 16 instead of 32. The same number of epochs makes 2× more updates" in said


def test_a_workloads_own_knob_changes_what_is_trained() -> None:
    other = complete(2, {"workload.width": 2}, 62.6)
    said = sentence(shown(best_table(outcome(best=standing(other, 63.4, 2.1)), [])))
    assert "It sets workload.width=2, which may change what is trained." in said


def test_one_winner_is_named_once() -> None:
    said = sentence(shown(best_table(outcome(best=standing(TRIALS[1], 61.4, 2.03)), TRIALS)))
    assert said.count("2.03× the baseline") == 1
    assert "Best, overall and at your own batch size (32): bf16 + channels_last" in said


def test_the_baseline_may_be_the_best_at_its_batch_size() -> None:
    said = sentence(shown(best_table(outcome(best_same_batch=outcome().baseline), TRIALS)))
    assert "Best at your own batch size (32): the baseline itself. Best overall" in said


def test_no_speedup_is_claimed_that_was_not_shown() -> None:
    kept = outcome().baseline
    nobody = {"best": kept, "best_same_batch": kept, "finding": Finding.KEEP}
    said = sentence(shown(best_table(outcome(**nobody), TRIALS)))
    assert "No configuration was shown to be faster than the baseline." in said and "Best" not in said
    assert "It is the best of what was tried. Keep what you have." in said
    open_ = {**nobody, "finding": Finding.OPEN, "profile": None, "folder": "/x/studies/s"}
    said = sentence(shown(best_table(outcome(**open_, because="others used the machine", advice="wait."), TRIALS)))
    assert "No verdict, and no profile. Others used the machine. Wait." in said
    assert "Keep what you have" not in said and "Profile:" not in said and "autotune train" not in said


@pytest.mark.parametrize(("steps", "when"), [(1730, "after 1,730 steps"), (0, "from the first step")])
def test_when_compiling_pays(steps: int, when: str) -> None:
    pays = BreakEven(compile_s=40.6, eager_config=TRIALS[1].config, eager_samples_per_second=60.9, steps=steps)
    said = sentence(shown(best_table(outcome(break_even=pays), TRIALS)))
    assert "Compiling costs 41 s, and is ahead of the best eager finalist (bf16 + channels_last, " in said
    assert f"60.9 samples/s) {when}." in said


def test_the_search_is_accounted_for_and_the_next_commands_can_be_typed() -> None:
    lines = shown(best_table(outcome(), TRIALS, PurePath("/home/me")), 120)
    said = sentence(lines)
    assert "13 trials: 9 complete · 1 pruned · 2 oom · 1 loader_worker_died." in said
    assert "The budget is used up. 9 min 58 s of searching, of which 3 min 41 s inside kept windows" in said
    assert "Making the data took 1 min 36 s before that." in said
    assert "  autotune train --profile studies/resnet50-1/profile.yaml --model resnet50" in lines
    assert "  autotune export resnet50-1 --format python -o resnet50_1.py" in lines
    elsewhere = shown(best_table(outcome(model="my model.py"), TRIALS), 120)
    assert "  autotune export /home/me/studies/resnet50-1 --format python -o resnet50_1.py" in elsewhere
    assert any(line.endswith("--model 'my model.py'") for line in elsewhere)
    of_ranks = shown(best_table(outcome(ranks=2), TRIALS, PurePath("/home/me")), 120)
    assert "  autotune train --profile studies/resnet50-1/profile.yaml --model resnet50" in of_ranks


def test_another_objective_and_a_device_are_named() -> None:
    said = sentence(shown(best_table(outcome(objective="energy", memory_is="device"), TRIALS)))
    assert "Ordered by the objective energy." in said
    assert "Peak memory is the device's." in said


def test_the_space_is_shown_with_its_refusals(probe: Probe, host: Host) -> None:
    request = SpaceRequest(narrowed={"batch_size": (64, 128)}, batch_size=32)
    said = sentence(shown(space_table(build_space(probe, host, request)), 200))
    assert "fp32*, bf16" in said
    assert "tf32, fp16: needs a CUDA device" in said
    assert "64, 128, (baseline: 32)" in said
    assert "pin_memory page-locked host memory not here needs a CUDA device" in said
    assert "Legal here: 4,704 configurations." in said


def test_a_huge_grid_is_not_counted_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = tuple(Choice(n) for n in range(1, 12))
    space = Space(choices={"batch_size": sizes}, inactive={}, baseline={"batch_size": 1})
    monkeypatch.setattr(listing, "COUNT_CAP", 10)
    assert "Legal here: more than 10 configurations." in shown(space_table(space))
    monkeypatch.setattr(listing, "COUNT_CAP", 11)
    assert "Legal here: 11 configurations." in shown(space_table(space))


def test_every_trial_is_shown_with_its_cause() -> None:
    odd = complete(20, FAST, 60.0, unclean_exit=True).model_copy(update={"repeats": 1})
    lines = shown(trials_table([*TRIALS, odd], BASE))
    assert all(cell_len(line) <= 80 for line in lines)
    for part in ("complete", "bf16 + channels_last", "60.9 ± 1.2", "1.25 GiB", "1 min 23 s"):
        assert part in row(lines, 1)
    assert "~14.2" in row(lines, 6)
    said = sentence(lines)
    assert "4 oom in first step: no memory" in said
    assert "5 loader_worker_died in first step: worker [red]1[/red] [2J was killed" in said
    for note in ("20 repeats trial 1", "20 the process died after"):
        assert note in said
    assert "14 trials: 10 complete · 1 pruned" in said
    assert "0 trials." in shown(trials_table([], BASE))


def test_what_a_launch_says_against_its_own_figure_is_shown() -> None:
    busy = Window(steps=5, samples=160, seconds=1.5, discarded="others used 1.2 cores while none was free.")
    measured = {"settled": False, "unsettled": "The step times\x1b[2J went on changing.", "discarded": (busy, busy)}
    odd = make_trial(3, BASE, 30.0, measurement=make_measurement(30.0, **measured))
    old = make_trial(4, BASE, 30.0, measurement=make_measurement(30.0, settled=False))
    said = sentence(shown(trials_table([odd, old], BASE), 120))
    assert "3 The step times [2J went on changing" in said
    assert "3 2 windows discarded: others used 1.2 cores while none was free" in said
    assert "4 it had not settled when it was measured" in said
    clean = shown(trials_table([make_trial(3, BASE, 30.0)], BASE))
    assert len(clean) < len(shown(trials_table([odd], BASE)))


def test_a_pruned_trial_shows_a_rate_that_was_only_seen_even_when_measured() -> None:
    measured = make_measurement(14.0)
    slow = make_trial(6, BASE, 14.0, status=TrialStatus.PRUNED, cause="slow", measurement=measured)
    assert slow.result.measurement is not None
    lines = shown(trials_table([slow], BASE))
    assert "~14.0" in row(lines, 6)
    assert "±" not in row(lines, 6)


def test_the_list_of_studies() -> None:
    rows = [
        StudyRow("resnet50-1", "resnet50", "done", 31, 2.453, "2025-03-01T10:22:31+00:00", "/w/studies/resnet50-1"),
        StudyRow("mine", "src/models/a_detector.py", "interrupted", 4, None, "2025-03-02", "/w/studies/mine"),
    ]
    lines = shown(studies_table(rows))
    assert all(cell_len(line) <= 80 for line in lines)
    first, second = (next(line for line in lines if line.startswith(name)) for name in ("resnet50-1", "mine"))
    assert first.split() == ["resnet50-1", "resnet50", "done", "31", "2.45×", "2025-03-01", "10:22"]
    assert second.split()[-4:] == ["interrupted", "4", "-", "2025-03-02"]
    assert lines[-1] == "in /w/studies"
    assert "autotune search" in sentence(shown(studies_table([])))


@pytest.mark.parametrize("width", [1, 20, 40, *range(50, 130, 7)])
def test_nothing_is_lost_on_a_narrow_terminal(width: int, probe: Probe, host: Host) -> None:
    space = build_space(probe, host, SpaceRequest(batch_size=32))
    for renderable in (best_table(outcome(), TRIALS), trials_table(TRIALS, BASE), space_table(space)):
        lines, wide = shown(renderable, width), shown(renderable, 300)
        assert not [line for line in lines if "…" in line]
        assert sorted(figures(lines)) == sorted(figures(wide))
        assert {line.strip() for line in wide if line.startswith("  autotune ")} <= {line.strip() for line in lines}
        assert {line for line in wide if line.startswith(("Profile: ", "Report: "))} <= set(lines)
        longest = max(len(word) for line in wide for word in line.split()) + 12
        commands = ("  autotune ", "Profile: ", "Report: ")
        assert all(cell_len(line) <= max(width, longest) for line in lines if not line.startswith(commands))


def figures(lines: Sequence[str]) -> list[str]:
    return re.findall(r"\d[\d,.]*", sentence(lines))


@pytest.fixture
def host() -> Host:
    return make_host(
        cores=2, memory_bytes=8 * GIB, available_bytes=7 * GIB, shm_bytes=GIB, shm_free_bytes=GIB, open_files=1024
    )


@pytest.fixture
def probe() -> Probe:
    return make_probe(cores=2, sample_bytes=110_592)
