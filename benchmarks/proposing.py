"""Times the proposals of `--sampler auto` as a function of the number of earlier trials."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import optuna

from autotune.base.records import Config, Phase, Trial, TrialResult, TrialStatus
from autotune.samplers import AutoSampler
from autotune.samplers.sampler import RECORD, distributions
from autotune.space import Space, SpaceRequest, build_space, canonical, key
from tests.support import make_host, make_measurement, make_probe


def gpu_space() -> Space:
    """Return a space like that of a search on a large GPU, with about 10⁵ configurations."""
    probe = make_probe(
        device="cuda:0",
        device_memory_bytes=80 * 10**9,
        cudagraphs=True,
        tf32=True,
        cores=16,
        dataset_samples=None,
        optimizer_impls=("for-loop", "foreach", "fused"),
    )
    return build_space(probe, make_host(cores=16, shm_free_bytes=2**36, available_bytes=2**37), SpaceRequest())


def proposal_s(space: Space, trials: Sequence[int], around: int) -> dict[int, list[float]]:
    """Return the seconds of the last ``around`` proposals before each given number of finished trials."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")
    sampler = AutoSampler(space, capacity_bytes=80 * 10**9)
    rng = random.Random(0)
    choices = {name: space.legal(name) for name in space.choices}
    offered = distributions(space)
    known: set[str] = set()
    config: Config = space.baseline
    seconds: list[float] = []
    while len(known) < max(trials):
        known.add(key(config))
        record = _trial(len(known) - 1, config, rng)
        study.add_trial(
            optuna.trial.create_trial(
                params=dict(config),
                distributions={n: offered[n] for n in config},
                value=record.score,
                user_attrs={RECORD: record.model_dump(mode="json")},
            )
        )
        began = time.perf_counter()
        sampler.look(study)
        seconds.append(time.perf_counter() - began)
        while key(config) in known or space.refusal(config) is not None:
            config = canonical({name: rng.choice(values) for name, values in choices.items()})
    return {number: seconds[max(0, number - around) : number] for number in trials}


def _trial(number: int, config: Config, rng: random.Random) -> Trial:
    rate = rng.uniform(90, 110)
    measurement = make_measurement(
        rate,
        batch_size=int(config["batch_size"]),
        device_per_s=rate * rng.uniform(1, 1.2),
        loader_capacity_per_s=rate * rng.uniform(1, 5),
        windows=(),
        step_s=(),
        wait_s=(),
        device_s=(),
        losses=(),
        first_losses=(),
    )
    result = TrialResult(
        launch=f"{number:05d}",
        status=TrialStatus.COMPLETE,
        measurement=measurement,
        phase_s={Phase.COMPILE: 1.0},
        wall_s=10.0,
    )
    return Trial(number=number, config=dict(config), result=result, score=rate)
