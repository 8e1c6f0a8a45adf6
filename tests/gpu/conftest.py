"""Real launches on a real card, addressed as a search addresses it."""

import os

import pytest

from autotune.base.layout import LaunchFiles
from autotune.base.records import MeasurePlan
from autotune.machine.gpu import gpus, visible
from autotune.search.request import resolve_device
from autotune.space import environment
from autotune.workload.catalog import find_workload
from tests.support import make_spec

#: Long enough for every phase, and for a dozen windows.
PLAN = MeasurePlan(target_halfwidth=0.001, min_window_s=0.2, max_measure_s=3.0, max_warmup_s=3.0)


@pytest.fixture(scope="session")
def card():
    """The first card, as NVML describes it."""
    return resolve_device("auto").gpu


@pytest.fixture(scope="session")
def two_cards(card):
    """The UUIDs of that card and of another one like it."""
    if card is None:
        return []
    seen = visible(gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    others = [one.uuid for one in seen if (one.name, one.mig) == (card.name, False) and one.uuid != card.uuid]
    if not others or card.profile is not None:
        pytest.skip("needs two equal cards, and NVML lists one")
    return [card.uuid, others[0]]


@pytest.fixture
def launch(process_launcher, workloads, tmp_path, card):
    """``launch(config, args, name=…, on_beat=…, cards=…, **spec)``: the result of a launch and its files."""

    def run(config=None, args=None, *, name="launch", on_beat=lambda beat: None, cards=None, **changes):
        config = {"batch_size": 32, "num_workers": 0, **(config or {})}
        shown = [card.uuid] if card is not None and cards is None else cards
        spec = make_spec(
            tmp_path / name,
            **{
                "workload": find_workload(
                    str(workloads / "on_card.py"), {"folder": str(tmp_path / name), **(args or {})}
                ),
                "config": config,
                "batch_size": 32,
                "devices": ("cpu" if card is None else "cuda:0",),
                "env": {**({"CUDA_VISIBLE_DEVICES": ",".join(shown)} if shown else {}), **environment(config)},
                "plan": PLAN,
                **changes,
            },
        )
        return process_launcher.run(spec, on_beat=on_beat, stop=lambda: False), LaunchFiles(tmp_path / name)

    return run
