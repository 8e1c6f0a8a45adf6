"""What knobs do to a model and an optimizer: the same in a script and in a workload, and nothing to other tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.agent.site.autotune_agent import in_place
from autotune.base.errors import AutotuneError
from autotune.knobs import KNOBS, SiteFacts
from autotune.launcher import script_entry
from autotune.training.step import Switch, apply_model, as_found
from tests.support import make_host, make_probe

LAST = {4: "channels_last", 5: "channels_last_3d"}


CASES = [(kind, dimensions) for kind in ("AdamW", "SGD") for dimensions in LAST]


@pytest.fixture(scope="module")
def in_both() -> dict[tuple[str, int], Any]:
    """Of each case, what was in force in a workload and in a script, and why not."""
    told = [
        {"config": {"memory_format": LAST[n], "optimizer_impl": "fused"}, "kind": kind, "dimensions": n}
        for kind, n in CASES
    ]
    words = [sys.executable, str(Path(__file__).with_name("in_both.py")), json.dumps(told)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(script_entry.FOLDER), str(script_entry.FOLDER.parents[2])])}
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dimensions"), CASES)
def test_a_script_gets_what_a_workload_gets(in_both: dict[tuple[str, int], Any], kind: str, dimensions: int) -> None:
    workload, script, why_not = in_both[kind, dimensions]
    assert workload == script and why_not == [None, None]
    layout = in_place.torch_format(LAST[dimensions])
    sides = [8] * (dimensions - 2)
    weights = torch.empty(4, 3, *[3] * (dimensions - 2)).contiguous(memory_format=layout).stride()
    assert tuple(script["weight"]) == tuple(script["gradient"]) == weights
    assert script["state"] and {tuple(strides) for strides in script["state"].values()} == {weights}
    images = torch.empty(2, 3, *sides).contiguous(memory_format=layout).stride()
    assert {tuple(strides) for strides in script["inputs"]} == {images}
    # SGD's fused kernels spoil its momentum in a step that overflows.
    assert script["flags"] == {"foreach": False, "fused": True} and script["scales"] is (kind == "AdamW")


def _flat(net: nn.Module) -> object:
    parts = list(net.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in parts])
    for part, own in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
        part.data = own.view_as(part)
    return flat


def _flat_gradients(net: nn.Module) -> object:
    parts = list(net.parameters())
    flat = torch.zeros(sum(p.numel() for p in parts))
    for part, own in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
        part.grad = own.view_as(part)
    return flat


def _twice(net: nn.Module) -> object:
    net.other = nn.Parameter(net[0].weight.data)
    return None


def _average(net: nn.Module) -> object:
    return net[0].weight.detach().view(-1)


def _buffer(net: nn.Module) -> object:
    memory = torch.zeros(3, 2, 3, 8, 8)
    net.register_buffer("memory", memory[1])
    return memory


@pytest.mark.parametrize("share", [_flat, _flat_gradients, _twice, _average, _buffer])
def test_tensors_that_share_their_memory_stay_where_they_are(share: Any) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    assert in_place.cannot_lay_out(net, "channels_last") is None
    held = share(net)
    assert in_place.cannot_lay_out(net, "channels_last") == in_place.SHARED
    assert in_place.shares_memory(net)
    assert in_place.cannot_lay_out(net, "contiguous") is None, "there is nothing to be moved"
    with pytest.raises(RuntimeError, match="share their memory"):
        apply_model(net, {"memory_format": "channels_last"}, "cpu")
    switch = Switch(net, torch.optim.SGD(net.parameters(), lr=0.1), as_found())
    with pytest.raises((RuntimeError, AutotuneError), match="share their memory"):
        switch.to({"memory_format": "channels_last"})
    switch.to({"memory_format": "contiguous"})
    del held


def test_a_weight_that_two_modules_use_is_one_weight() -> None:
    net = nn.ModuleList([nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)])
    net[1].weight = net[0].weight
    for _ in range(2):
        net[1](net[0](torch.randn(2, 3, 8, 8))).sum().backward()
        assert in_place.cannot_lay_out(net, "channels_last") is None
    apply_model(net, {"memory_format": "channels_last"}, "cpu")
    assert net[1].weight is net[0].weight and not net[0].weight.is_contiguous()


def test_state_that_shares_its_memory_stays_where_it_is() -> None:
    net = nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    memory = torch.zeros(2, *net.weight.shape)
    optimizer.state[net.weight]["momentum_buffer"] = memory[0]
    KNOBS["memory_format"].switch_model(net, optimizer, "channels_last")
    assert not net.weight.is_contiguous() and optimizer.state[net.weight]["momentum_buffer"].is_contiguous()


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TOP_PAD_", "1"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"), ("LD_PRELOAD", "libjemalloc.so")],
)
def test_an_allocator_that_somebody_has_chosen_is_left_alone(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert in_place.cannot_set_malloc("keep") is None
    monkeypatch.setenv(name, value)
    assert in_place.set_malloc("keep") == in_place.NOT_GLIBCS and in_place.malloc_now() == "default"
    assert in_place.own_malloc() is None
    assert KNOBS["malloc"].inactive_because(SiteFacts(make_probe(malloc=None), make_host(), 32)) == in_place.NOT_GLIBCS
    with pytest.warns(UserWarning, match="malloc=keep is not in force"):
        KNOBS["malloc"].apply_process("keep")


def test_memory_that_the_environment_keeps_is_the_baselines() -> None:
    lines = "from autotune.agent.site.autotune_agent import in_place; print(in_place.own_malloc())"
    env = {**os.environ, **in_place.MALLOC_KEEPS}
    done = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, check=True, timeout=60, env=env
    )
    assert done.stdout == "keep\n"
    facts = SiteFacts(make_probe(malloc="keep"), make_host(), 32)
    assert KNOBS["malloc"].inactive_because(facts) is None and KNOBS["malloc"].default_here(facts) == "keep"
    assert "your own variables" in str(KNOBS["malloc"].refusal("default", facts))


@pytest.mark.slow
@pytest.mark.parametrize("value", ["default", "keep"])
def test_freed_memory_is_kept_where_it_is_to_be(value: str) -> None:
    lines = f"""
import resource, torch
from autotune.agent.site.autotune_agent import in_place
assert in_place.set_malloc({value!r}) is None
for _ in range(30):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**25)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False, timeout=120)
    # 128 MiB have 2**15 pages, or 2**6 of the larger kind. What else is allocated may come to lie in their place.
    _, *again = map(int, done.stdout.split())
    assert (min(again) < 2**6) == (value == "keep"), done.stderr
