"""``autotune search --dry-run``: runs a probe and measures nothing."""

from __future__ import annotations

import pytest

from .conftest import Project


@pytest.mark.usefixtures("searching_here")
def test_says_what_would_be_tried(project: Project) -> None:
    studies = set(project.folder.glob("studies/*"))
    options = ["--model", "my_tiny_net.py", "--device", "cpu", "--budget", "2m", "--dry-run"]
    done = project.typed("search", *options)
    assert done.returncode == 0, done.stderr
    assert "legal configurations" in done.stdout and "First the baseline" in done.stdout and "×" in done.stdout
    found = project.json("search", *options, "--set", "batch_size=16,32", "--json")
    assert found["configurations"] > 10 and found["search_s"] == 48.0
    assert {c["config"]["batch_size"] for c in found["first"]} <= {16, 32}
    assert set(project.folder.glob("studies/*")) == studies
