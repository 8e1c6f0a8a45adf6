"""The contract of `autotune.launcher.Launcher` as a test suite for any implementation.

A test class inherits the suite and provides a fixture with its launcher and scenarios::

    class TestMine(LauncherContract):
        @pytest.fixture
        def rig(self) -> LauncherRig:
            return LauncherRig(launcher=..., spec=...)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from autotune.base.errors import MachineError
from autotune.base.layout import LaunchFiles
from autotune.base.records import Beat, HeatPlan, LaunchKind, Phase, PhaseLimits, TrialResult, TrialSpec, TrialStatus
from autotune.knobs.compile_mode import phase_clause
from autotune.launcher import Launcher

_ORDER = list(Phase)
_E = TypeVar("_E", bound=Exception)


class Scenario(StrEnum):
    """The behaviour of a launch."""

    #: Trains without errors, and measures everything within seconds.
    HEALTHY = "healthy"
    #: The workload's code raises.
    RAISES = "raises"
    #: The process dies without writing a result.
    DIES = "dies"
    #: Never ends by itself.
    ENDLESS = "endless"


@dataclass(frozen=True)
class LauncherRig:
    """The launcher under test.

    Attributes:
        launcher: the suite uses it again after `close`, so it must reacquire what it has released.
        spec: makes the spec of a measure launch in a folder that behaves according to the scenario.
    """

    launcher: Launcher
    spec: Callable[[Scenario, Path], TrialSpec]

    def run(
        self,
        spec: TrialSpec,
        *,
        on_beat: Callable[[Beat], None] = lambda beat: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> TrialResult:
        """Run a launch, by default without a watcher."""
        return self.launcher.run(spec, on_beat=on_beat, stop=stop)


class LauncherContract:
    """The contract suite. Subclasses provide a fixture ``rig`` that returns a `LauncherRig`."""

    def test_a_healthy_launch_is_complete_and_measured(self, rig: LauncherRig, tmp_path: Path) -> None:
        spec = rig.spec(Scenario.HEALTHY, tmp_path / "a")
        result = rig.run(spec)
        assert result.status is TrialStatus.COMPLETE
        assert (result.launch, result.cause, result.exit_code, result.unclean_exit) == (spec.launch, None, 0, False)
        assert result.measurement is not None and result.probe is None
        low, high = result.measurement.ci95_per_s
        assert 0 <= low <= result.measurement.samples_per_s <= high
        assert result.measurement.batch_size == spec.batch_size

    def test_a_probe_answers_and_takes_no_step(self, rig: LauncherRig, tmp_path: Path) -> None:
        spec = rig.spec(Scenario.HEALTHY, tmp_path / "probe").model_copy(update={"kind": LaunchKind.PROBE})
        beats: list[Beat] = []
        result = rig.run(spec, on_beat=beats.append)
        assert result.status is TrialStatus.COMPLETE
        assert result.probe is not None and result.measurement is None
        assert [beat.phase for beat in beats] == [Phase.LOAD, Phase.BUILD]

    def test_beats_come_in_the_order_of_the_phases(self, rig: LauncherRig, tmp_path: Path) -> None:
        beats: list[Beat] = []
        rig.run(rig.spec(Scenario.HEALTHY, tmp_path / "a"), on_beat=beats.append)
        seen = [_ORDER.index(beat.phase) for beat in beats]
        assert seen == sorted(seen)
        assert {beat.phase for beat in beats} == set(Phase)
        steps = [beat.step for beat in beats if beat.step]
        assert steps == sorted(set(steps))

    def test_phases_account_for_the_time(self, rig: LauncherRig, tmp_path: Path) -> None:
        result = rig.run(rig.spec(Scenario.HEALTHY, tmp_path / "a"))
        assert set(result.phase_s) == set(Phase)
        assert all(seconds >= 0 for seconds in result.phase_s.values())
        assert 0 < sum(result.phase_s.values()) <= result.wall_s * 1.001

    def test_the_files_say_what_was_asked_and_returned(self, rig: LauncherRig, tmp_path: Path) -> None:
        for scenario in (Scenario.HEALTHY, Scenario.RAISES, Scenario.DIES):
            spec = rig.spec(scenario, tmp_path / "deep" / "er" / scenario)
            result = rig.run(spec)
            files = LaunchFiles(Path(spec.folder))
            assert TrialSpec.model_validate_json(files.spec.read_bytes()) == spec
            assert TrialResult.model_validate_json(files.result.read_bytes()) == result

    def test_the_spec_is_on_disk_before_the_first_beat(self, rig: LauncherRig, tmp_path: Path) -> None:
        spec = rig.spec(Scenario.HEALTHY, tmp_path / "a")
        there: list[bool] = []
        rig.run(spec, on_beat=lambda beat: there.append(LaunchFiles(Path(spec.folder)).spec.exists()))
        assert there and all(there)

    def test_a_failure_has_its_status_and_cause_and_the_next_launch_works(
        self, rig: LauncherRig, tmp_path: Path
    ) -> None:
        expected = {
            Scenario.RAISES: {TrialStatus.USER_ERROR},
            Scenario.DIES: {TrialStatus.CRASHED, TrialStatus.KILLED},
        }
        for scenario, statuses in expected.items():
            result = rig.run(rig.spec(scenario, tmp_path / scenario))
            assert result.status in statuses
            assert result.cause and result.phase is not None
            assert result.measurement is None and result.rate_seen_per_s is None
            # An exception will be raised again, but a process that died may succeed when it is retried.
            assert result.transient == (scenario is Scenario.DIES)
            _next_works(rig, tmp_path / f"after-{scenario}")

    def test_a_result_is_not_inherited_from_an_earlier_launch_in_the_folder(
        self, rig: LauncherRig, tmp_path: Path
    ) -> None:
        assert rig.run(rig.spec(Scenario.HEALTHY, tmp_path / "a")).status is TrialStatus.COMPLETE
        again = rig.run(rig.spec(Scenario.DIES, tmp_path / "a"))
        assert again.status is not TrialStatus.COMPLETE and again.measurement is None

    def test_stop_interrupts(self, rig: LauncherRig, tmp_path: Path) -> None:
        asked = 0

        def stop() -> bool:
            nonlocal asked
            asked += 1
            return asked > 2

        result = rig.run(rig.spec(Scenario.ENDLESS, tmp_path / "a"), stop=stop)
        assert result.status is TrialStatus.INTERRUPTED
        assert result.cause and result.measurement is None and not result.transient
        _next_works(rig, tmp_path / "b")

    def test_a_limit_ends_it_and_the_phase_is_named(self, rig: LauncherRig, tmp_path: Path) -> None:
        limits = PhaseLimits(load_s=1.5, build_s=1.5, compile_s=1.5, warmup_s=1.5, measure_s=1.5, silence_s=1.0)
        spec = rig.spec(Scenario.ENDLESS, tmp_path / "a").model_copy(update={"limits": limits})
        beats: list[Beat] = []
        result = rig.run(spec, on_beat=beats.append)
        assert result.status in (TrialStatus.TIMEOUT, TrialStatus.HANG)
        assert result.phase is beats[-1].phase
        assert result.cause and result.phase and phase_clause(result.phase, spec.config) in result.cause
        _next_works(rig, tmp_path / "b")

    def test_a_slow_launch_is_pruned_with_the_rate_it_ran_at(self, rig: LauncherRig, tmp_path: Path) -> None:
        spec = rig.spec(Scenario.HEALTHY, tmp_path / "a")
        plan = spec.plan.model_copy(update={"prune_below_per_s": 1e12})
        result = rig.run(spec.model_copy(update={"plan": plan}))
        assert (result.status, result.exit_code, result.transient) == (TrialStatus.PRUNED, 0, False)
        assert result.cause
        assert result.rate_seen_per_s is not None and 0 < result.rate_seen_per_s < 1e12
        assert result.measurement is None or result.measurement.ci95_per_s[1] < 1e12

    def test_a_heat_compares_its_entrants_in_turns(self, rig: LauncherRig, tmp_path: Path) -> None:
        spec = _heat(rig.spec(Scenario.HEALTHY, tmp_path / "heat"))
        beats: list[Beat] = []
        result = rig.run(spec, on_beat=beats.append)
        assert result.status is TrialStatus.COMPLETE, result.cause
        assert spec.heat is not None and result.heat is not None and result.measurement is None
        assert tuple(entrant.config for entrant in result.heat.entrants) == spec.heat.entrants
        reference, other = result.heat.entrants
        assert reference.ratio == 1.0 and other.ratio is not None and other.ratio > 0
        assert len(reference.turns) == len(other.turns) and all(reference.turns)
        assert {beat.turn for beat in beats} >= {0, 1} and result.turn is None

    def test_a_heat_that_dies_names_whose_turn_it_was(self, rig: LauncherRig, tmp_path: Path) -> None:
        result = rig.run(_heat(rig.spec(Scenario.DIES, tmp_path / "dies")))
        assert result.status in {TrialStatus.CRASHED, TrialStatus.KILLED}
        assert result.heat is None and result.turn in (0, 1)
        _next_works(rig, tmp_path / "next")

    def test_a_launch_on_a_quiet_machine_does_not_wait(self, rig: LauncherRig, tmp_path: Path) -> None:
        assert rig.run(rig.spec(Scenario.HEALTHY, tmp_path / "a")).waited_s == 0.0

    def test_an_error_of_the_watcher_passes_through_and_the_next_launch_works(
        self, rig: LauncherRig, tmp_path: Path
    ) -> None:
        upset = RuntimeError("the watcher failed")

        def fail(beat: Beat) -> None:
            raise upset

        spec = rig.spec(Scenario.ENDLESS, tmp_path / "a")
        assert _raised(RuntimeError, lambda: rig.run(spec, on_beat=fail)) is upset
        _next_works(rig, tmp_path / "b")

    def test_a_folder_that_cannot_be_made_is_the_machines_fault(self, rig: LauncherRig, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        spec = rig.spec(Scenario.HEALTHY, tmp_path / "file" / "a")
        error = _raised(MachineError, lambda: rig.run(spec))
        assert str(tmp_path / "file") in str(error) and error.advice
        _next_works(rig, tmp_path / "b")

    def test_close_may_be_called_twice_and_at_any_time_between_launches(self, rig: LauncherRig, tmp_path: Path) -> None:
        rig.launcher.close()
        rig.launcher.close()
        _next_works(rig, tmp_path / "a")


def _heat(spec: TrialSpec) -> TrialSpec:
    """Return the spec of a heat of two: a configuration, and the same with twice the batch size."""
    larger = {**spec.config, "batch_size": 2 * spec.batch_size}
    plan = HeatPlan(entrants=(spec.config, larger), turn_s=0.01, max_rounds=3, max_s=5.0)
    return spec.model_copy(update={"kind": LaunchKind.HEAT, "heat": plan})


def _next_works(rig: LauncherRig, folder: Path) -> None:
    result = rig.run(rig.spec(Scenario.HEALTHY, folder))
    assert result.status is TrialStatus.COMPLETE, result.cause


def _raised(kind: type[_E], act: Callable[[], object]) -> _E:
    # pytest.raises would make pytest a dependency of everyone who imports this package's fakes.
    try:
        act()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")
