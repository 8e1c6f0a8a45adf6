"""A training whose epochs nobody knows, such as a script's without a loader, has a profile as any other."""

from pathlib import Path

import pytest

from autotune.base.records import TrialSpec
from autotune.profile import read
from tests.support import Play, make_measurement

from .test_going_on import run
from .world import World


def play(spec: TrialSpec) -> Play:
    rate = 130.0 if spec.config["memory_format"] == "channels_last" else 100.0
    return Play(rate_per_s=rate, wall_s=6.0, measurement=make_measurement(rate, epoch_samples=0))


@pytest.mark.slow
def test_it_can_be_won(tmp_path: Path) -> None:
    world = World(tmp_path)
    outcome = run(world, play)
    assert outcome.profile is not None and outcome.best is not None and outcome.best.speedup > 1.2
    assert read(Path(outcome.profile)).conditions.epoch_samples is None
