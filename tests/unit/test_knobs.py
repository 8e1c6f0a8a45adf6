"""The catalog of knobs: every file is complete, the page matches the files, and no other place names a knob."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

import autotune
from autotune.knobs import KNOBS, Knob, SiteFacts
from autotune.knobs.page import page
from autotune.samplers.auto.features import Features, expectations
from autotune.space import SpaceRequest, build_space
from tests.support import make_host, make_probe

PACKAGE = Path(autotune.__file__).parent
CPU = SiteFacts(make_probe(), make_host(), 32)
CUDA = SiteFacts(make_probe(device="cuda:0"), make_host(), 32)
every_knob = pytest.mark.parametrize("knob", KNOBS.values(), ids=KNOBS)


@every_knob
def test_a_files_docstring_has_all_parts(knob: Knob) -> None:
    story = inspect.getdoc(import_module(f"autotune.knobs.{knob.name}")) or ""
    for part in ("Helps:", "Hurts:", "Source: https://"):
        assert f"\n\n{part}" in story, f"{knob.name}: {part} is missing"


@every_knob
@pytest.mark.parametrize("facts", [CPU, CUDA], ids=["cpu", "cuda"])
def test_a_files_declarations_are_consistent(knob: Knob, facts: SiteFacts) -> None:
    if knob.inactive_because(facts):
        return
    ladder = knob.ladder(facts)
    assert len(set(map(repr, ladder))) == len(ladder) > 1
    default = knob.default_here(facts)
    assert default in ladder and knob.refusal(default, facts) is None
    known = (None, *ladder) if knob.numeric else knob.values or ()
    for part in ("device", "loader", "whole"):
        assert set(map(repr, knob.effects(part))) <= set(map(repr, known))
    assert knob.effects("whole"), "the sampler would not see it"
    phrases = [knob.phrase(value) for value in ladder]
    assert len(set(phrases)) == len(phrases)
    assert knob.needs is None or knob.needs in KNOBS


def test_the_sampler_sees_every_knob_of_a_space() -> None:
    space = build_space(make_probe(workload_knobs={"depth": (1, 2)}), make_host(), SpaceRequest())
    for part in ("device", "loader", "whole"):
        named = {name for name, _ in expectations(part)}
        features = Features(space, expectations(part))
        told = {effect.name for effect in features._effects}
        open_ = {name for name in space.choices if len(space.legal(name)) > 1}
        assert {name for name in open_ if name in named or name.startswith("workload.")} == told
    assert {name for name, _ in expectations("whole")} == set(KNOBS)


def test_a_knob_without_expectations_gets_the_default_ones() -> None:
    class Plain(Knob):
        name, about, scope, values, default = "plain", "made up", KNOBS["num_workers"].scope, (False, True), False

    assert set(Plain().effects("loader")) == set(Plain().effects("whole")) == {False, True}
    assert Plain().effects("device") == {}


def test_the_page_is_up_to_date() -> None:
    written = (PACKAGE.parent / "docs" / "knobs.md").read_text()
    assert written == page(), "write it anew: python -m autotune.knobs > docs/knobs.md"


def test_no_other_place_names_a_knob() -> None:
    """A table elsewhere would be incomplete after adding a knob. Only the batch size may be named, because rates are in
    samples. The agent is exempt, which is told nothing but PyTorch's own names."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if {"agent", "knobs"} & set(path.relative_to(PACKAGE).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in KNOBS and node.value != "batch_size":
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} names {node.value}")
    assert found == []
