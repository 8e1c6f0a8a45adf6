"""Recorded surfaces, and searches replayed on them."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from autotune.base.clock import VirtualClock
from autotune.base.errors import UsageError
from autotune.base.records import (
    Config,
    HeatPlan,
    LaunchKind,
    MeasurePlan,
    Phase,
    PhaseLimits,
    TrialResult,
    TrialStatus,
    Value,
)
from autotune.search.replay import Row, Surface, read_surface
from autotune.search.replay.run import ReplayLauncher, narrowed, replay
from autotune.space import canonical, device_part, key
from autotune.workload.scoring import Scorer
from benchmarks.rows import row_of
from tests.support import PLAIN, make_spec, surfaces, write_surface

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
    write_surface(path, KNOBS, PLAIN, rate, memory, capacity_bytes=2**29)
    return path


def configurations() -> list[dict[str, Value]]:
    found = {key(c): c for v in product(*KNOBS.values()) for c in [canonical(dict(zip(KNOBS, v, strict=True)))]}
    return list(found.values())


@pytest.fixture
def surface(file: Path) -> Surface:
    return read_surface(file)


def run(launcher: ReplayLauncher, config: dict[str, Value], kind: LaunchKind = LaunchKind.MEASURE, **plan: float):
    spec = make_spec(
        Path("nowhere"), config=config, batch_size=config["batch_size"], kind=kind, plan=MeasurePlan(**plan)
    )
    return launcher.run(spec, on_beat=lambda beat: None, stop=lambda: False)


class TestSurface:
    def test_the_space_consists_of_the_recorded_values(self, surface: Surface) -> None:
        assert {key(c) for c in surface.space.grid()} == {key(c) for c in configurations()}
        assert surface.space.refusal({**PLAIN, "batch_size": 48}) is not None

    def test_a_combination_that_was_not_recorded_is_refused(self, file: Path) -> None:
        lines = file.read_text().splitlines()
        gone = key({**PLAIN, "precision": "bf16"})
        kept = [line for line in lines[1:] if key(json.loads(line)["config"]) != gone]
        file.write_text("\n".join([lines[0], *kept]) + "\n")
        refusal = read_surface(file).space.refusal({**PLAIN, "precision": "bf16"})
        assert refusal is not None and "recorded" in refusal

    def test_a_row_has_the_launchs_measurement(self, surface: Surface) -> None:
        again = surface.launches[key(PLAIN)][0].measurement()
        assert again is not None
        # Six digits are kept, and no per-step values.
        assert again.samples_per_s == pytest.approx(50, rel=1e-3)
        assert again.peak_allocated_bytes == memory(PLAIN)
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
        result = run(ReplayLauncher(surface, clock), PLAIN)
        assert result.status is TrialStatus.COMPLETE
        assert clock.now() - began == result.wall_s
        assert result.wall_s in [pytest.approx(r.wall_s) for r in surface.launches[key(PLAIN)]]
        assert list(result.phase_s) == ["load", "build", "compile", "warmup", "measure"]
        assert result.phase_s["build"] == pytest.approx(0.4)

    def test_repeats_use_different_recorded_launches_until_all_were_used(self, surface: Surface) -> None:
        launcher = ReplayLauncher(surface, VirtualClock(), seed=3)
        rates = [run(launcher, PLAIN).measurement.samples_per_s for _ in range(6)]
        assert all(len(set(rates[i : i + 2])) == 2 for i in (0, 2, 4))
        assert len(set(rates)) == 2

    def test_other_launches_do_not_affect_a_result(self, surface: Surface) -> None:
        alone, among = (ReplayLauncher(surface, VirtualClock(), seed=5) for _ in range(2))
        other = {**PLAIN, "precision": "bf16"}
        for _ in range(4):
            run(among, other)
            assert run(alone, PLAIN).measurement == run(among, PLAIN).measurement

    def test_a_graph_is_compiled_once(self, surface: Surface) -> None:
        launcher = ReplayLauncher(surface, VirtualClock())
        compiled = {**PLAIN, "compile_mode": "default"}
        with_workers = {**compiled, "num_workers": 2, "prefetch_factor": 2, "persistent_workers": True}
        seconds = [run(launcher, c).phase_s["compile"] for c in (compiled, compiled, with_workers, compiled)]
        assert seconds == pytest.approx([40.0, 6.0, 6.0, 6.0])

    def test_a_slow_launch_is_pruned_by_the_real_rule(self, surface: Surface) -> None:
        launcher = ReplayLauncher(surface, VirtualClock())
        whole = run(launcher, PLAIN)
        result = run(launcher, PLAIN, prune_below_per_s=80.0)
        assert result.status is TrialStatus.PRUNED
        assert result.rate_seen_per_s == pytest.approx(50, rel=0.05)
        assert result.wall_s < whole.wall_s - 2
        assert run(launcher, PLAIN, prune_below_per_s=40.0).status is TrialStatus.COMPLETE

    def test_a_recorded_failure_recurs(self, surface: Surface) -> None:
        result = run(ReplayLauncher(surface, VirtualClock()), {**PLAIN, "batch_size": 128})
        assert (result.status, result.phase, result.cause) == (TrialStatus.OOM, Phase.COMPILE, "no memory")
        assert result.wall_s == pytest.approx(1.5)

    def test_a_launch_that_no_replay_needs_is_not_invented(self, surface: Surface) -> None:
        launcher = ReplayLauncher(surface, VirtualClock())
        for kind in (LaunchKind.DEVICE_ONLY, LaunchKind.TRAIN_CHECK, LaunchKind.HOLD, LaunchKind.PROBE):
            with pytest.raises(LookupError, match="holds no"):
                run(launcher, PLAIN, kind)

    def test_stop_ends_a_launch(self, surface: Surface) -> None:
        spec = make_spec(Path("nowhere"), config=PLAIN, batch_size=32)
        result = ReplayLauncher(surface, VirtualClock()).run(spec, on_beat=lambda beat: None, stop=lambda: True)
        assert result.status is TrialStatus.INTERRUPTED


class TestHeats:
    @pytest.fixture
    def surface(self, tmp_path: Path) -> Surface:
        path = tmp_path / "heats.jsonl"
        write_surface(path, KNOBS, PLAIN, rate, memory, capacity_bytes=2**29, heats=True)
        return read_surface(path)

    def race(self, launcher: ReplayLauncher, *entrants: Config, **plan: object) -> TrialResult:
        spec = make_spec(
            Path("nowhere"),
            config=dict(entrants[0]),
            batch_size=32,
            kind=LaunchKind.HEAT,
            heat=HeatPlan(entrants=tuple(dict(e) for e in entrants), **plan),
        )
        return launcher.run(spec, on_beat=lambda beat: None, stop=lambda: False)

    def test_the_real_race_with_the_recorded_turns(self, surface: Surface) -> None:
        fast = {**PLAIN, "precision": "bf16"}
        result = self.race(ReplayLauncher(surface, VirtualClock()), PLAIN, fast)
        assert result.status is TrialStatus.COMPLETE and result.heat is not None
        reference, other = result.heat.entrants
        # Rounds are slow for both alike.
        assert other.ratio == pytest.approx(1.6) and reference.ratio == 1.0
        first_s = sum(e.first_step_s or 0.0 for e in (reference, other))
        spent_s = result.heat.startup_s + result.heat.measured_s + result.heat.switch_s + first_s
        assert result.wall_s == pytest.approx(spent_s) == pytest.approx(sum(result.phase_s.values()))
        assert sum(t.seconds for e in (reference, other) for t in e.turns if t) == pytest.approx(result.heat.measured_s)

    def test_who_ran_out_of_memory_does_so_again(self, surface: Surface) -> None:
        large = {**PLAIN, "batch_size": 128}
        result = self.race(ReplayLauncher(surface, VirtualClock()), PLAIN, large, {**PLAIN, "batch_size": 64})
        assert (result.status, result.heat, result.turn) == (TrialStatus.OOM, None, 1)

    def test_a_reference_that_fails_ends_it(self, surface: Surface) -> None:
        result = self.race(ReplayLauncher(surface, VirtualClock()), {**PLAIN, "batch_size": 128}, PLAIN)
        assert (result.status, result.heat, result.turn) == (TrialStatus.OOM, None, 0)

    def test_a_graph_compiled_in_a_heat_is_in_the_cache_for_a_trial(self, surface: Surface) -> None:
        launcher = ReplayLauncher(surface, VirtualClock())
        compiled = canonical({**PLAIN, "compile_mode": "default"})
        heat = self.race(launcher, PLAIN, compiled).heat
        assert heat is not None and heat.entrants[1].first_step_s == surfaces.COLD_S
        assert run(launcher, compiled).phase_s[Phase.COMPILE] == pytest.approx(surfaces.WARM_S)

    def test_the_time_limit_is_charged_to_whose_turn_it_is(self, surface: Surface) -> None:
        compiled = canonical({**PLAIN, "compile_mode": "default"})
        spec = make_spec(
            Path("nowhere"),
            config=PLAIN,
            kind=LaunchKind.HEAT,
            heat=HeatPlan(entrants=(PLAIN, compiled)),
            limits=PhaseLimits(compile_s=surfaces.COLD_S / 2),
        )
        launcher = ReplayLauncher(surface, VirtualClock())
        result = launcher.run(spec, on_beat=lambda beat: None, stop=lambda: False)
        assert (result.status, result.phase, result.turn) == (TrialStatus.TIMEOUT, Phase.COMPILE, 1)
        # It does not last until the compiling would have ended.
        assert result.phase_s[Phase.COMPILE] < surfaces.COLD_S * 0.6

    def test_what_no_heat_has_is_not_invented(self, surface: Surface) -> None:
        result = self.race(ReplayLauncher(surface, VirtualClock()), PLAIN, {**PLAIN, "batch_size": 48})
        assert (result.status, result.heat, result.wall_s) == (TrialStatus.INTERRUPTED, None, 0.0)
        assert result.cause == "no heat of the device with all these entrants was recorded"

    def test_no_turn_is_shown_twice(self, surface: Surface) -> None:
        near = {**PLAIN, "memory_format": "channels_last"}
        found = self.race(ReplayLauncher(surface, VirtualClock()), PLAIN, near, all_rounds=True, max_rounds=40).heat
        assert found is not None and {len(e.turns) for e in found.entrants} == {6}

    def test_a_turn_that_others_disturbed_takes_no_part(self, surface: Surface) -> None:
        row = surface.heats["device"][0]
        some = [e.model_copy(update={"turns": (None, *e.turns[1:])}) for e in row.entrants]
        rows = (*surface.rows[:-2], row.model_copy(update={"entrants": tuple(some)}))
        fast = {**PLAIN, "precision": "bf16"}
        found = self.race(ReplayLauncher(Surface(surface.heading, rows), VirtualClock()), PLAIN, fast).heat
        assert found is not None and found.entrants[1].turns[0] is None
        assert found.entrants[1].ratio == pytest.approx(1.6)

    def test_a_heat_is_kept_as_it_was(self, surface: Surface) -> None:
        fast = {**PLAIN, "precision": "bf16"}
        result = self.race(ReplayLauncher(surface, VirtualClock()), PLAIN, fast, all_rounds=True, max_rounds=6)
        row = Row.model_validate_json(
            row_of(result, PLAIN, kind=LaunchKind.HEAT, number=1, began_s=0.0).model_dump_json(exclude_none=True)
        )
        assert result.heat is not None and row.side == "device" and row.rounds == 6
        assert [e.config for e in row.entrants] == [device_part(PLAIN), device_part(fast)]
        kept, turn = row.entrants[1].turn(2), result.heat.entrants[1].turns[2]
        assert kept is not None and turn is not None and kept.seconds == pytest.approx(turn.seconds, rel=1e-4)
        assert row.between_each_s == pytest.approx(surface.heats["device"][0].between_each_s, rel=1e-3)

    def test_what_has_no_rows_has_no_heats(self, surface: Surface) -> None:
        assert surface.has_heats and not Surface(surface.heading, ()).has_heats

    def test_a_search_has_heats(self, surface: Surface, scorer: Scorer) -> None:
        found = replay(surface, scorer, budget_s=1200, seed=1)
        assert found.heats and found.best.config["precision"] == "bf16" and found.best.verified
        # While there is much to gain within seconds, compiling waits.
        assert {e.config["compile_mode"] for e in found.heats[0].heat.entrants} == {"off"}
        assert replay(surface, scorer, budget_s=1200, seed=1) == found

    def test_a_surface_without_heats_of_one_side_is_searched_without(self, surface: Surface, scorer: Scorer) -> None:
        rows = tuple(row for row in surface.rows if row.side != "loader")
        assert replay(Surface(surface.heading, rows), scorer, budget_s=600).heats == ()


class TestReplay:
    def test_finds_and_proves_the_best(self, surface: Surface, scorer: Scorer) -> None:
        found = replay(surface, scorer, budget_s=600)
        best = max(configurations(), key=lambda c: rate(c))
        assert found.steps[0].trial.config == PLAIN
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
        write_surface(path, KNOBS, PLAIN, rate, memory)
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
        # The best at the user's own batch size may be tried without being asked for.
        unasked = [s.trial.config["batch_size"] for s in found.steps[1:] if s.trial.predicted is None]
        assert unasked in ([], [found.steps[0].trial.config["batch_size"]])
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
