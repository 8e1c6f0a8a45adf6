"""Guarantees of the public fakes beyond the launcher's contract."""

import pytest

from autotune import stats
from autotune.base.layout import LaunchFiles
from autotune.base.records import Beat, LaunchKind, Phase, TrialStatus
from autotune.space import key
from tests.support import FakeClock, Play, ScriptedLauncher, make_host, make_measurement, make_probe, make_spec


def run(launcher, spec):
    return launcher.run(spec, on_beat=lambda beat: None, stop=lambda: False)


def test_a_clock_moves_when_it_is_told_to():
    clock = FakeClock(5.0)
    clock.sleep(2.0)
    clock.advance(0.5)
    assert clock.now() == 7.5
    with pytest.raises(ValueError, match="-1"):
        clock.advance(-1)


def test_a_measurement_agrees_with_itself():
    made = make_measurement(250.0, batch_size=16, spread=0.02)
    rate = stats.rate_of(made.windows)
    assert made.samples_per_s == pytest.approx(250.0) == pytest.approx(rate.per_s)
    assert made.ci95_per_s == (rate.low_per_s, rate.high_per_s)
    assert rate.low_per_s < 250 < rate.high_per_s
    assert len(made.step_s) == len(made.losses) == sum(w.steps for w in made.windows)
    assert sum(made.step_s) == pytest.approx(made.measured_s)
    assert made.loader_wait_fraction == pytest.approx(sum(made.wait_s) / sum(made.step_s))


def test_a_slow_measurement_has_at_least_a_step_in_a_window():
    made = make_measurement(0.5, batch_size=128, spread=0.0)
    assert {w.steps for w in made.windows} == {1}
    assert made.ci95_per_s == (0.5, 0.5)


def test_a_measurement_needs_a_rate():
    with pytest.raises(ValueError, match="0"):
        make_measurement(0)


def test_makers_replace_what_they_are_told_and_refuse_what_is_no_field():
    assert make_probe(device="cuda:0").device == "cuda:0"
    assert make_host(cores=64).cores == 64
    assert make_measurement(compile_s=9.0).compile_s == 9.0
    with pytest.raises(ValueError, match="corse"):
        make_host(corse=64)


def test_a_table_is_read_by_canonical_key(tmp_path):
    table = {key({"batch_size": 8, "num_workers": 0}): Play(rate_per_s=80.0)}
    launcher = ScriptedLauncher(table, FakeClock())
    config = {"num_workers": 0, "prefetch_factor": 4, "batch_size": 8}
    result = run(launcher, make_spec(tmp_path / "a", config=config, batch_size=8))
    assert result.measurement.samples_per_s == pytest.approx(80.0)
    with pytest.raises(LookupError, match="batch_size"):
        run(launcher, make_spec(tmp_path / "b", config={"batch_size": 9}))


def test_a_launch_takes_the_scripted_seconds(tmp_path):
    clock = FakeClock()
    launcher = ScriptedLauncher(lambda spec: Play(wall_s=40.0), clock)
    result = run(launcher, make_spec(tmp_path / "a"))
    assert result.wall_s == pytest.approx(40.0) == pytest.approx(clock.now() - 1000.0)
    assert sum(result.phase_s.values()) == pytest.approx(40.0)


def test_a_failure_ends_in_its_phase(tmp_path):
    play = Play(status=TrialStatus.OOM, phase=Phase.COMPILE, wall_s=10.0, cause="no room")
    result = run(ScriptedLauncher(lambda spec: play, FakeClock()), make_spec(tmp_path / "a"))
    assert (result.status, result.phase, result.cause) == (TrialStatus.OOM, Phase.COMPILE, "no room")
    assert list(result.phase_s) == ["load", "build", "compile"]
    assert result.wall_s == pytest.approx(4.0)


def test_the_given_probe_is_the_answer(tmp_path):
    probe = make_probe(device="cuda:0", cores=7)
    launcher = ScriptedLauncher({}, FakeClock(), probe=probe)
    assert run(launcher, make_spec(tmp_path / "a", kind=LaunchKind.PROBE)).probe == probe


def test_a_crash_of_the_search_leaves_a_spec_and_no_result(tmp_path):
    launcher = ScriptedLauncher(lambda spec: Play(), FakeClock(), raise_at={1: KeyboardInterrupt()})
    assert run(launcher, make_spec(tmp_path / "a")).status is TrialStatus.COMPLETE
    with pytest.raises(KeyboardInterrupt):
        run(launcher, make_spec(tmp_path / "b"))
    files = LaunchFiles(tmp_path / "b")
    assert files.spec.exists() and not files.result.exists()
    assert run(launcher, make_spec(tmp_path / "c")).status is TrialStatus.COMPLETE
    assert [spec.launch for spec in launcher.specs] == ["a", "b", "c"]


def test_a_scripted_prune_has_its_rate(tmp_path):
    launcher = ScriptedLauncher(lambda spec: Play(rate_per_s=3.0, status=TrialStatus.PRUNED), FakeClock())
    result = run(launcher, make_spec(tmp_path / "a"))
    assert (result.status, result.rate_seen_per_s) == (TrialStatus.PRUNED, 3.0)


def test_a_pruned_launch_may_bring_what_it_measured(tmp_path):
    play = Play(rate_per_s=3.0, status=TrialStatus.PRUNED, measurement=make_measurement(3.0))
    result = run(ScriptedLauncher(lambda spec: play, FakeClock()), make_spec(tmp_path / "a"))
    assert result.status is TrialStatus.PRUNED and result.measurement == make_measurement(3.0)


def test_what_may_go_well_another_time_says_so(tmp_path):
    plays = {
        "killed": Play(status=TrialStatus.KILLED),
        "disturbed": Play(status=TrialStatus.INTERRUPTED, transient=True),
        "oom": Play(status=TrialStatus.OOM),
        "complete": Play(),
    }
    launcher = ScriptedLauncher(lambda spec: plays[spec.launch], FakeClock())
    told = {name: run(launcher, make_spec(tmp_path / name)).transient for name in plays}
    assert told == {"killed": True, "disturbed": True, "oom": False, "complete": False}
    stopped = launcher.run(make_spec(tmp_path / "disturbed"), on_beat=lambda beat: None, stop=lambda: True)
    assert stopped.status is TrialStatus.INTERRUPTED and not stopped.transient


def test_waiting_is_not_the_launchs_own_time(tmp_path):
    clock = FakeClock()
    result = run(ScriptedLauncher(lambda spec: Play(waited_s=60.0, wall_s=5.0), clock), make_spec(tmp_path / "a"))
    assert (result.waited_s, result.wall_s) == (60.0, pytest.approx(5.0))
    assert clock.now() == pytest.approx(1065.0)


def test_beats_carry_the_rate_while_measuring(tmp_path):
    beats: list[Beat] = []
    launcher = ScriptedLauncher(lambda spec: Play(rate_per_s=70.0), FakeClock())
    launcher.run(make_spec(tmp_path / "a"), on_beat=beats.append, stop=lambda: False)
    assert {beat.rate_per_s for beat in beats if beat.phase is Phase.MEASURE and beat.step} == {70.0}


def test_closing_is_counted():
    launcher = ScriptedLauncher({}, FakeClock())
    launcher.close()
    launcher.close()
    assert launcher.closed == 2
