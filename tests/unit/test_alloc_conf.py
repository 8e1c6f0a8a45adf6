"""The allocator's settings, beside those that the user's own environment holds. They need no card."""

import os
from pathlib import Path

import pytest
import torch

from autotune.base.records import TrialSpec
from autotune.knobs import KNOBS, SiteFacts
from autotune.knobs.alloc_conf import expands, limits_splitting
from autotune.search import search
from autotune.training.process_settings import process
from tests.support import make_host, make_probe

from .world import FIXED, World, plain

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
DEFAULT, EXPANDABLE, WHOLE = "default", "expandable_segments", "max_split_size_mb"
OTHERS = "max_split_size_mb:128,roundup_power2_divisions:[256:1,>:4]"


@pytest.fixture
def told(monkeypatch):
    """Return what the allocator has been told in this process."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("this PyTorch does not tell the allocator's settings")
    yield torch._C._accelerator_getAllocatorSettings
    torch._C._accelerator_setAllocatorSettings("")


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize(
    ("users", "value", "settings"),
    [
        ("", EXPANDABLE, "expandable_segments:True"),
        (OTHERS, EXPANDABLE, f"{OTHERS},expandable_segments:True"),
        ("expandable_segments:True", DEFAULT, "expandable_segments:False"),
        (f"expandable_segments:True,{OTHERS}", DEFAULT, f"{OTHERS},expandable_segments:False"),
        (f"{OTHERS}, expandable_segments : False", EXPANDABLE, f"{OTHERS},expandable_segments:True"),
        ("", WHOLE, "expandable_segments:False,max_split_size_mb:128"),
        (
            "roundup_power2_divisions:4",
            WHOLE,
            "roundup_power2_divisions:4,expandable_segments:False,max_split_size_mb:128",
        ),
    ],
)
def test_the_allocator_is_told_before_cuda_wakes(told, monkeypatch, variable, users, value, settings):
    monkeypatch.setenv(variable, users)
    for _ in range(2):  # the second time changes nothing
        process({"alloc_conf": value})
        assert told() == settings
    assert {os.environ[name] for name in VARIABLES} == {settings}


@pytest.mark.parametrize(
    ("users", "value"), [("", DEFAULT), (OTHERS, DEFAULT), ("expandable_segments:True", EXPANDABLE)]
)
def test_what_the_user_has_already_is_left_alone(told, monkeypatch, users, value):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", users)
    process({"alloc_conf": value})
    assert told() in (users, "")
    assert os.environ["PYTORCH_ALLOC_CONF"] == users and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


def test_the_users_own_setting_is_the_baseline():
    assert expands({"PYTORCH_ALLOC_CONF": f"{OTHERS},expandable_segments:True"})
    assert not expands({"PYTORCH_ALLOC_CONF": "expandable_segments:True,expandable_segments:False"})
    # PyTorch reads this one first.
    assert not expands({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": OTHERS})
    for own, value in ((False, DEFAULT), (True, EXPANDABLE)):
        facts = SiteFacts(make_probe(expandable_segments=own), make_host(), 32)
        assert KNOBS["alloc_conf"].default_here(facts) == value
    assert limits_splitting({"PYTORCH_ALLOC_CONF": OTHERS}) and not limits_splitting({})
    facts = SiteFacts(make_probe(limits_splitting=True), make_host(), 32)
    assert KNOBS["alloc_conf"].refusal(WHOLE, facts) == "your own settings limit it already"
    assert KNOBS["alloc_conf"].refusal(EXPANDABLE, facts) is None


def test_all_values_run_in_the_same_environment(tmp_path: Path):
    """Otherwise each flip would start a new template, which imports torch again."""
    seen: list[TrialSpec] = []

    def script(spec):
        seen.append(spec)
        return plain(spec)

    world = World(tmp_path)
    fixed = {name: value for name, value in FIXED.items() if name != "intra_op_threads"}
    search(world.spec(trials=6, fixed=fixed), tmp_path, world.env(script, device="cuda:0", cudagraphs=True))
    assert {DEFAULT} < {spec.config["alloc_conf"] for spec in seen} <= {DEFAULT, EXPANDABLE, WHOLE}
    assert len({tuple(spec.env.items()) for spec in seen}) == 1
