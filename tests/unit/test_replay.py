"""Recorded surfaces, and searches replayed on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from autotune.catalog import find_objective
from autotune.clock import VirtualClock
from autotune.errors import UsageError
from autotune.records import Config, LaunchKind, MeasurePlan, Phase, TrialStatus, Value
from autotune.replay import ReplayLauncher, Surface, read_surface
from autotune.replay.run import narrowed, replay
from autotune.scoring import Scorer
from autotune.space import canonical, key
from autotune.testing import make_spec, surfaces, write_surface

BASELINE: dict[str, Value] = {
    "precision": "fp32",
    "compile_mode": "off",
    "batch_size": 32,
    "memory_format": "contiguous",
    "num_workers": 0,
}
KNOBS: dict[str, tuple[Value, ...]] = {
    "precision": ("fp32", "bf16"),
    "compile_mode": ("off", "default"),
    "batch_size": (16, 32, 64, 128),
    "memory_format": ("contiguous", "channels_last"),
    "num_workers": (0, 2),
    "prefetch_factor": (2,),
    "persistent_workers": (True,),
}


def rate(config: Config) -> float:
    gain = 1.6 if config["precision"] == "bf16" else 1.0
    gain *= 1.25 if config["memory_format"] == "channels_last" else 1.0
    gain *= 1.1 if config["compile_mode"] == "default" else 1.0
    return 50 * gain * (int(config["batch_size"]) / 32) ** 0.2


def memory(config: Config) -> int:
    return 2**26 + int(config["batch_size"]) * (2**22 if config["precision"] == "fp32" else 2**21)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A surface on which fp32 runs out of memory above batch size 64."""
    path = tmp_path / "made-up.jsonl"
    write_surface(path, KNOBS, BASELINE, rate, memory, capacity_bytes=2**29)
    return path


def configurations() -> list[dict[str, Value]]:
    found = {key(c): c for v in product(*KNOBS.values()) for c in [canonical(dict(zip(KNOBS, v, strict=True)))]}
    return list(found.values())


@pytest.fixture
def surface(file: Path) -> Surface:
    return read_surface(file)


@pytest.fixture
def scorer() -> Iterator[Scorer]:
    made = Scorer(find_objective("throughput"))
    yield made
    made.close()


def run(launcher: ReplayLauncher, config: dict[str, Value], kind: LaunchKind = LaunchKind.MEASURE, **plan: float):
    spec = make_spec(
        Path("nowhere"), config=config, batch_size=config["batch_size"], kind=kind, plan=MeasurePlan(**plan)
    )
    return launcher.run(spec, on_beat=lambda beat: None, stop=lambda: False)


class TestSurface:
    def test_the_space_consists_of_the_recorded_values(self, surface: Surface) -> None:
        assert {key(c) for c in surface.space.grid()} == {key(c) for c in configurations()}
        assert surface.space.refusal({**BASELINE, "batch_size": 48}) is not None

    def test_a_combination_that_was_not_recorded_is_refused(self, file: Path) -> None:
        lines = file.read_text().splitlines()
        gone = key({**BASELINE, "precision": "bf16"})
        kept = [line for line in lines[1:] if key(json.loads(line)["config"]) != gone]
        file.write_text("\n".join([lines[0], *kept]) + "\n")
        refusal = read_surface(file).space.refusal({**BASELINE, "precision": "bf16"})
        assert refusal is not None and "recorded" in refusal

    def test_a_row_has_the_launchs_measurement(self, surface: Surface) -> None:
        again = surface.launches[key(BASELINE)][0].measurement()
        assert again is not None
        # Six digits are kept, and no per-step values.
        assert again.samples_per_s == pytest.approx(50, rel=1e-3)
        assert again.peak_allocated_bytes == memory(BASELINE)
        assert again.device_per_s == pytest.approx(again.samples_per_s / 0.9, rel=1e-3)
        assert len(again.windows) == 8 and again.step_s == ()

    def test_a_truncated_last_line_is_ignored(self, file: Path) -> None:
        whole = read_surface(file)
        file.write_text(file.read_text() + '{"number": 99, "beg')
        assert read_surface(file) == whole

    @pytest.mark.parametrize(
        ("text", "told"),
        [("", "no surface"), ("{}\n", "no surface"), ('{"number": 1}\n', "no surface"), ("not json\n", "no surface")],
    )
    def test_an_invalid_file_is_refused(self, tmp_path: Path, text: str, told: str) -> None:
        path = tmp_path / "x.jsonl"
        path.write_text(text)
        with pytest.raises(UsageError, match=told):
            read_surface(path)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="cannot be read"):
            read_surface(tmp_path / "nothing.jsonl")

    def test_a_recording_without_its_baseline(self, file: Path) -> None:
        lines = file.read_text().splitlines()
        file.write_text("\n".join([lines[0], *(x for x in lines[1:] if '"contiguous"' not in x)]) + "\n")
        with pytest.raises(UsageError, match="baseline"):
            read_surface(file)


class TestLauncher:
    def test_takes_the_recorded_seconds(self, surface: Surface) -> None:
        clock = VirtualClock()
        began = clock.now()
        result = run(ReplayLauncher(surface, clock), BASELINE)
        assert result.status is TrialStatus.COMPLETE
        assert clock.now() - began == result.wall_s
        assert result.wall_s in [pytest.approx(r.wall_s) for r in surface.launches[key(BASELINE)]]
        assert list(result.phase_s) == ["load", "build", "compile", "warmup", "measure"]
        assert result.phase_s["build"] == pytest.approx(0.4)

    def test_repeats_use_different_recorded_launches_until_all_were_used(self, surface: Surface) -> None:
        launcher = ReplayLauncher(surface, VirtualClock(), seed=3)
        rates = [run(launcher, BASELINE).measurement.samples_per_s for _ in range(6)]
        assert all(len(set(rates[i : i + 2])) == 2 for i in (0, 2, 4))
        assert len(set(rates)) == 2

    def test_other_launches_do_not_affect_a_result(self, surface: Surface) -> None:
        alone, among = (ReplayLauncher(surface, VirtualClock(), seed=5) for _ in range(2))
        other = {**BASELINE, "precision": "bf16"}
        for _ in range(4):
            run(among, other)
            assert run(alone, BASELINE).measurement == run(among, BASELINE).measurement

    def test_a_graph_is_compiled_once(self, surface: Surface) -> None:
        launcher = ReplayLauncher(surface, VirtualClock())
        compiled = {**BASELINE, "compile_mode": "default"}
        with_workers = {**compiled, "num_workers": 2, "prefetch_factor": 2, "persistent_workers": True}
        seconds = [run(launcher, c).phase_s["compile"] for c in (compiled, compiled, with_workers, compiled)]
        assert seconds == pytest.approx([40.0, 6.0, 6.0, 6.0])

    def test_a_slow_launch_is_pruned_by_the_real_rule(self, surface: Surface) -> None:
        launcher = ReplayLauncher(surface, VirtualClock())
        whole = run(launcher, BASELINE)
        result = run(launcher, BASELINE, prune_below_per_s=80.0)
        assert result.status is TrialStatus.PRUNED
        assert result.rate_seen_per_s == pytest.approx(50, rel=0.05)
        assert result.wall_s < whole.wall_s - 2
        assert run(launcher, BASELINE, prune_below_per_s=40.0).status is TrialStatus.COMPLETE

    def test_a_recorded_failure_recurs(self, surface: Surface) -> None:
        result = run(ReplayLauncher(surface, VirtualClock()), {**BASELINE, "batch_size": 128})
        assert (result.status, result.phase, result.cause) == (TrialStatus.OOM, Phase.COMPILE, "no memory")
        assert result.wall_s == pytest.approx(1.5)

    def test_the_two_ceilings(self, surface: Surface) -> None:
        launcher = ReplayLauncher(surface, VirtualClock())
        # The number of workers does not affect the device.
        workers = {**BASELINE, "num_workers": 2, "prefetch_factor": 2, "persistent_workers": True}
        assert run(launcher, workers, LaunchKind.DEVICE_ONLY).status is TrialStatus.COMPLETE
        with pytest.raises(LookupError, match="loader_only"):
            run(launcher, workers, LaunchKind.LOADER_ONLY)

    def test_a_ceiling_that_was_not_recorded_is_not_invented(self, surface: Surface) -> None:
        launcher = ReplayLauncher(surface, VirtualClock())
        for kind in (LaunchKind.TRAIN_CHECK, LaunchKind.HOLD, LaunchKind.PROBE):
            with pytest.raises(LookupError, match="holds no"):
                run(launcher, BASELINE, kind)

    def test_stop_ends_a_launch(self, surface: Surface) -> None:
        spec = make_spec(Path("nowhere"), config=BASELINE, batch_size=32)
        result = ReplayLauncher(surface, VirtualClock()).run(spec, on_beat=lambda beat: None, stop=lambda: True)
        assert result.status is TrialStatus.INTERRUPTED


class TestReplay:
    def test_finds_and_proves_the_best(self, surface: Surface, scorer: Scorer) -> None:
        found = replay(surface, scorer, budget_s=600)
        best = max(configurations(), key=lambda c: rate(c))
        assert found.steps[0].trial.config == BASELINE
        assert rate(found.best.config) > 0.97 * rate(best)
        assert found.best.speedup_ci95[0] > 1 and found.best.launches >= 2
        assert found.searched_s < found.elapsed_s <= 600 + 20

    def test_no_trial_runs_out_of_memory(self, surface: Surface, scorer: Scorer) -> None:
        for seed in range(5):
            found = replay(surface, scorer, budget_s=600, seed=seed)
            assert {s.trial.result.status for s in found.steps} <= {TrialStatus.COMPLETE, TrialStatus.PRUNED}

    @pytest.mark.parametrize("sampler", ["auto", "tpe", "random", "grid"])
    def test_depends_on_the_seed_only(self, surface: Surface, scorer: Scorer, sampler: str) -> None:
        first, second = (replay(surface, scorer, budget_s=200, sampler=sampler, seed=4) for _ in range(2))
        assert first == second

    @pytest.mark.parametrize("sampler", ["auto", "random"])
    def test_a_mode_that_ran_out_of_time_compiling_is_not_tried_again(
        self, tmp_path: Path, scorer: Scorer, sampler: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The limit is 150 s.
        monkeypatch.setattr(surfaces, "COLD_S", 170.0)
        path = tmp_path / "slow-compiler.jsonl"
        write_surface(path, KNOBS, BASELINE, rate, memory)
        for seed in range(3):
            found = replay(read_surface(path), scorer, budget_s=600, sampler=sampler, seed=seed)
            ended = [
                s.trial.config["compile_mode"] for s in found.steps if s.trial.result.status is TrialStatus.TIMEOUT
            ]
            assert len(ended) <= 1
            assert len(found.steps) > 6

    def test_predictions_are_kept(self, surface: Surface, scorer: Scorer) -> None:
        found = replay(surface, scorer, budget_s=600)
        told = [s.trial.predicted for s in found.steps]
        assert told[0] is None
        # The best at the user's own batch size may be tried at the end without being asked for.
        assert None not in told[1:-1]
        assert all(p.rate_per_s > 0 and p.seconds > 0 and p.why for p in told if p is not None)

    def test_a_part_of_the_space_can_be_searched(self, surface: Surface, scorer: Scorer) -> None:
        part = narrowed(surface.space, {"precision": "fp32"}, {"batch_size": ("32", "64")})
        found = replay(surface, scorer, budget_s=600, space=part)
        tried = [s.trial.config for s in found.steps]
        assert {c["precision"] for c in tried} == {"fp32"} and {c["batch_size"] for c in tried} == {32, 64}

    @pytest.mark.parametrize(
        ("fixed", "told"),
        [
            ({"precision": "fp16"}, "was not recorded"),
            ({"alloc_conf": "default"}, "no knob"),
            ({"batch": "1"}, "no knob"),
        ],
    )
    def test_an_unknown_part_of_the_space_is_refused(self, surface: Surface, fixed: dict[str, str], told: str) -> None:
        with pytest.raises(UsageError, match=told):
            narrowed(surface.space, fixed, {})
