"""Progress in a notebook: one output that is updated in place."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from autotune.search.tuning import NotebookPanel, in_notebook

from .test_panel import Seconds, a_search


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """What a front end would get: for each output, its first content and its updates."""
    shown: list[list[dict[str, str]]] = []

    def display(content: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw and display_id
        shown.append([content])
        return types.SimpleNamespace(update=lambda content, raw: shown[-1].append(content))

    part = types.ModuleType("IPython.display")
    vars(part)["display"] = display
    monkeypatch.setitem(sys.modules, "IPython.display", part)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    return shown


def test_one_output_is_updated(outputs: list[list[dict[str, str]]]) -> None:
    clock = Seconds()
    panel = NotebookPanel(clock)
    a_search(panel)
    clock.sleep(1.0)
    panel.clock(61.0, 600.0)
    panel.says("a sentence with <b>")
    panel.clock(62.0, 600.0)
    (updates,) = outputs
    during = updates[-2] if "61.8" in updates[-2]["text/html"] else updates[-3]
    assert during["text/html"].count("<pre") == 1 and "resnet50, on cpu, batch 32" in during["text/html"]
    assert "61.8" in during["text/plain"] and "\x1b" not in during["text/plain"]
    panel.ends()
    last = updates[-1]["text/html"]
    assert "<pre" not in last and last.endswith("<div>a sentence with &lt;b&gt;</div>")


def test_a_front_end_that_is_gone_ends_no_search(
    outputs: list[list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["IPython.display"], "display", lambda *_, **__: 1 / 0)
    panel = NotebookPanel(Seconds())
    a_search(panel)
    panel.ends()
    assert outputs == []


@pytest.mark.parametrize(("shell", "is_one"), [(None, False), ({}, False), ({"kernel": object()}, True)])
def test_where_it_is_shown(shell: dict[str, Any] | None, is_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ipython = types.ModuleType("IPython")
    vars(ipython)["get_ipython"] = lambda: None if shell is None else types.SimpleNamespace(**shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert in_notebook() is is_one
    monkeypatch.delitem(sys.modules, "IPython")
    assert in_notebook() is False
