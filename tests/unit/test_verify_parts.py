"""Parts of the proof: noise, verdicts, variants, simplicity."""

from types import SimpleNamespace

import pytest

from autotune import stats
from autotune.base.records import Finding, Heat, HeatEntrant, Limit, StudyHeat
from autotune.search.outcome import break_even_of, conclude, coverage
from autotune.search.proof.ceilings import (
    DeviceAndLoader,
    bottleneck,
    contradictory,
    variants_of,
    verdict,
    without_store,
)
from autotune.search.proof.race import Entrant, Race, entrant, finalists
from autotune.search.proof.winner import Proof
from autotune.search.recheck import kept
from autotune.space import Space, build_space, simplicity
from autotune.space.building import SpaceRequest
from autotune.space.requirements import ANYTHING
from tests.support import make_host, make_measurement, make_probe, make_standing, make_trial


def test_two_rounds_use_the_noise_seen_in_the_search() -> None:
    """The CPU's prior would call 1.12× a win; the launches of the search show how much they differ on this machine."""

    def of(number: int, *rates: float) -> Entrant:
        trial, *again = [make_measurement(r, relative_se=0.01) for r in rates]
        made = entrant(make_trial(number, {"batch_size": 32, "n": number}, measurement=trial))
        made.rounds += again
        return made

    noisy = [of(0, 115.0, 100.0, 88.0), of(1, 90.0, 111.0, 99.0)]
    context = SimpleNamespace(device="cpu", scorer=None, by_rate=True, required=ANYTHING, compiled_s={})
    compared = Race(context, noisy).compared()  # type: ignore[arg-type]
    ratio, low, high = compared.ratio(noisy[1], noisy[0])
    assert ratio == pytest.approx(1.12, abs=0.01)
    assert compared.noise.learnt and compared.noise.sd > 0.1
    assert low < 1 < high


@pytest.mark.parametrize(
    ("rate", "device", "loader", "workers", "limit"),
    [
        (100, 105, 400, 4, Limit.DEVICE),
        (100, 400, 105, 4, Limit.LOADER),
        (100, 104, 107, 4, Limit.BALANCED),
        (50, 100, 100, 0, Limit.BALANCED),
        (80, 400, 100, 0, Limit.LOADER),
    ],
)
def test_the_lower_ceiling_is_the_limit(rate: float, device: float, loader: float, workers: int, limit: Limit) -> None:
    found, sentence = verdict(
        {"num_workers": workers}, rate, 0.3, make_measurement(device, enqueue_s=None), make_measurement(loader)
    )
    assert found is limit
    assert sentence.startswith(limit) and f"{device:.4g}" in sentence and f"{loader:.4g}" in sentence


def test_a_device_that_waits_for_the_host_is_limited_by_launches() -> None:
    device = make_measurement(105, batch_size=32, enqueue_s=0.95 * 32 / 105)
    assert verdict({"num_workers": 2}, 100, 0.0, device, make_measurement(400))[0] is Limit.LAUNCH


def test_batches_that_were_made_and_do_not_come_are_not_the_workers_fault() -> None:
    """As with images of floats beside an H200: one thread hands on 4,300 of them, and more workers change nothing."""
    device, loader = make_measurement(5800, enqueue_s=None), make_measurement(4300)
    seen = make_measurement(4290, loader_wait_fraction=0.3, hand_over_fraction=0.26)
    assert seen.waits_for_hand_over
    config = {"num_workers": 16, "pin_memory": True, "batch_memory": "fresh"}
    limit, sentence = verdict(config, 4290, 0.3, device, loader, handed=0.26, on_cpu=False)
    assert limit is Limit.HAND_OVER and "26 %" in sentence and "pinned" in sentence and "batch_memory=slots" in sentence
    _, sentence = verdict({**config, "batch_memory": "slots"}, 4290, 0.3, device, loader, handed=0.26, on_cpu=False)
    assert "batch_memory" not in sentence
    # Workers that are too slow: a few batches of theirs wait, too.
    for waited, handed in ((0.5, 0.2), (0.1, 0.08), (0.3, None)):
        changed = {"loader_wait_fraction": waited, "hand_over_fraction": handed}
        assert not make_measurement(4290, **changed).waits_for_hand_over


def test_a_device_that_waits_for_copies_is_limited_by_them() -> None:
    """As one did with 16 workers, 512 images a batch, and no pinned memory (benchmarks/results)."""
    device, loader = make_measurement(6240, enqueue_s=None), make_measurement(42000)
    config = {"num_workers": 16, "pin_memory": False}
    limit, sentence = verdict(config, 2820, 0.006, device, loader, on_cpu=False)
    assert limit is Limit.COPY and "54 %" in sentence and "pin_memory" in sentence
    for changed, rate, waits, on_cpu in (
        ({"pin_memory": True}, 2820, 0.006, False),
        ({}, 2820, 0.006, True),
        ({}, 2820, 0.5, False),
        ({}, 5800, 0.006, False),
    ):
        assert verdict({**config, **changed}, rate, waits, device, loader, on_cpu=on_cpu)[0] is not Limit.COPY


def test_without_ceilings_the_wait_fraction_decides() -> None:
    assert verdict({}, 100, 0.8, None, None)[0] is Limit.LOADER
    assert verdict({}, 100, 0.02, None, make_measurement(100))[0] is Limit.DEVICE


def test_a_ceiling_that_contradicts_the_rate_is_withheld() -> None:
    """The device alone at 60.5 samples/s beside an end-to-end rate of 480: the machine was another one by then."""
    config, device, loader = {"num_workers": 4}, make_measurement(60.5), make_measurement(900)
    assert contradictory(480, device) and not contradictory(480, loader) and not contradictory(480, None)
    limit, sentence = verdict(config, 480, 0.7, device, loader)
    assert limit is Limit.LOADER and "60.5" not in sentence and "left out" in sentence
    # A ceiling that is a little lower than the rate is noise.
    assert not contradictory(100, make_measurement(95)) and "×" not in verdict(config, 100, 0.3, loader, device)[1]


@pytest.mark.parametrize(
    ("workers", "cores", "shared", "per_s"),
    [
        # A loader of 100 samples/s that waits for 90 % of its time is busy for 1 ms a sample for each of its workers.
        (0, 8, False, 1 / (1 / 400 + 0.001)),
        (4, 8, False, 400),
        (1, 8, False, 400),
        # 4 ms a sample on as many cores as there are, beside a device that needs none, or on its own cores.
        (4, 1, False, 250),
        (4, 2, True, 1 / (1 / 400 + 0.004 / 2)),
    ],
)
def test_without_its_store_a_loader_needs_what_it_computes(
    workers: int, cores: int, shared: bool, per_s: float
) -> None:
    found = without_store({"num_workers": workers}, DeviceAndLoader(400, 100, 0.9), cores, shared=shared)
    assert found == pytest.approx(per_s)


def test_without_ceilings_a_trainings_own_launches_tell_what_its_store_costs() -> None:
    """Without workers, times add up: of 10 ms a sample, 1 computes and 9 load, of which 8 wait for files."""
    seen = make_measurement(
        100, loader_wait_fraction=0.9, device_per_s=1000, loader_capacity_per_s=1000 / 9, loader_idle_fraction=8 / 9
    )
    one = entrant(make_trial(0, {"batch_size": 32, "num_workers": 0}, measurement=seen))
    found = bottleneck(one, 100, 2, True, None, None)
    assert found.limit is Limit.LOADER and found.store_fraction == pytest.approx(8 / 9)
    assert found.local_per_s == pytest.approx(1000 / 2)
    assert "from a copy in memory the training would run at about 500 samples/s" in found.sentence


@pytest.mark.parametrize(
    ("ratio", "answer"),
    [
        ((1.0, 0.97, 1.03), True),
        ((0.96, 0.91, 1.01), True),
        ((0.94, 0.90, 0.98), None),
        ((1.0, 0.5, 2.0), None),
        ((0.9, 0.86, 0.94), False),
    ],
)
def test_a_promise_is_kept_broken_or_open(ratio: tuple[float, float, float], answer: bool | None) -> None:
    assert kept(ratio, 0.95) is answer


@pytest.mark.parametrize(
    ("ratio", "answer"), [((0.93, 0.87, 0.99), True), ((0.85, 0.83, 0.87), False), ((0.86, 0.80, 0.94), None)]
)
def test_whatever_lies_in_the_promised_interval_was_promised(
    ratio: tuple[float, float, float], answer: bool | None
) -> None:
    """The profile says 2.10× (1.95 to 2.26)."""
    assert kept(ratio, 0.95, sureness=1.95 / 2.10) is answer


def space_of(**request: object) -> Space:
    return build_space(make_probe(), make_host(), SpaceRequest(**request))  # type: ignore[arg-type]


def test_a_loader_knob_is_set_back_with_the_workers() -> None:
    space = space_of()
    winner = {**space.baseline, "num_workers": 4, "prefetch_factor": 4, "persistent_workers": True}
    (one,) = variants_of(space, entrant(make_trial(1, winner)))
    assert one.knob == "num_workers" and one.entrant.config == dict(space.baseline)
    assert set(one.with_it) == {"prefetch_factor", "persistent_workers"}


def test_each_loader_knob_is_set_back_alone_if_the_baseline_has_workers() -> None:
    space = space_of(baseline={"num_workers": 2})
    winner = {**space.baseline, "num_workers": 4, "prefetch_factor": 4}
    variants = {v.knob: v.entrant.config for v in variants_of(space, entrant(make_trial(1, winner)))}
    assert set(variants) == {"num_workers", "prefetch_factor"}
    assert variants["num_workers"]["prefetch_factor"] == 4 and variants["num_workers"]["num_workers"] == 2


def test_simpler_configurations_sort_first() -> None:
    baseline = {"batch_size": 32, "compile_mode": "off", "num_workers": 4}
    eager = {**baseline, "batch_size": 64}
    compiled = {**baseline, "compile_mode": "default", "num_workers": 0}
    lean, hungry = simplicity(eager, baseline, 10), simplicity(eager, baseline, 20)
    assert simplicity(baseline, baseline, 99) < lean < hungry < simplicity(compiled, baseline, 1)


@pytest.mark.parametrize(("mhz", "raced"), [(1980.0, False), (1500.0, True), (None, False)])
def test_what_ran_at_lower_clocks_is_raced_if_the_clocks_may_be_the_reason(mhz: float | None, raced: bool) -> None:
    space = space_of()
    rates = [200.0, 199.0, 198.0, 170.0]
    trials = [
        make_trial(
            number,
            {**space.baseline, "batch_size": 64, "num_workers": number},
            measurement=make_measurement(rate, sm_clock_mhz=mhz if rate == 170 else 1980.0),
        )
        for number, rate in enumerate(rates, 1)
    ]
    chosen = finalists(space, trials, stats.LaunchNoise(0.003, 8, False))
    assert [t.number for t in chosen] == ([1, 2, 3, 4] if raced else [1, 2, 3])


@pytest.mark.parametrize("unproven", [(), (1, 3)])
def test_without_a_verdict_the_best_that_was_launched_in_turns_is_told_first(unproven: tuple[int, ...]) -> None:
    space = space_of()
    baseline = make_standing(0, space.baseline)
    faster = make_standing(2, {**space.baseline, "precision": "bf16"}, 126.0, 1.26, halfwidth=0.27)
    proof = Proof(baseline, baseline, baseline, finalists=(baseline, faster), unproven=unproven)
    found = conclude(
        space, [make_trial(0, space.baseline), make_trial(2, faster.config, 126.0)], [], proof, by_rate=True
    )
    assert found.finding is Finding.OPEN and found.because is not None
    first, *others = found.because.split("; ")
    assert first == "trial 2 ran at 1.26× the baseline (95 %: 0.92 to 1.60), which is no proof of being faster"
    as_well = "trials 1 and 3 may be faster as well, and could not be launched again in turns with the baseline"
    assert others == ([as_well] if unproven else [])


@pytest.mark.parametrize(("ratio", "measured"), [(None, 0), (0.9, 1)])
def test_an_entrant_without_an_undisturbed_turn_is_none_that_cannot_run(ratio: float | None, measured: int) -> None:
    space = space_of()
    entrants = (
        HeatEntrant(config=dict(space.baseline), ratio=1.0),
        HeatEntrant(config={**space.baseline, "precision": "bf16"}, ratio=ratio),
    )
    heat = Heat(entrants=entrants, noise_sd=0.01, startup_s=1.0, switch_s=0.1, measured_s=5.0, ended="time is up")
    trials = [make_trial(0, space.baseline, measurement=make_measurement(100.0, loader_wait_fraction=0.0))]
    found = coverage(space, trials, [StudyHeat(number=1, after=1, heat=heat, wall_s=6.0)])
    assert (found.measured, found.failed) == (measured, 0)


@pytest.mark.parametrize(("samples", "steps"), [(32, 500), (128, 125)], ids=["one batch", "accumulates"])
def test_compiling_pays_after_as_many_steps_as_its_trial_took_samples_for(samples: int, steps: int) -> None:
    """40 s of compiling are made up after 16,000 samples, at 200 of them a second instead of 133; how many of them are
    a step, its trial shows."""
    eager = {"batch_size": 32, "compile_mode": "off"}
    compiled = {**eager, "compile_mode": "default"}
    best = make_standing(1, compiled, 200.0, 1.5, compile_s=40.4)
    shown = make_measurement(200.0, batch_size=samples)
    trials = [make_trial(0, eager), make_trial(1, compiled, measurement=shown)]
    found = break_even_of(best, [best, make_standing(0, eager, 400 / 3, 1.0)], trials)
    assert found is not None and found.steps == pytest.approx(steps, abs=1)
