"""The page and the notebook on Python: their code runs as it stands, only with a shorter search."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import autotune

DOCS = Path(autotune.__file__).parents[1] / "docs"
#: One search of two configurations, of which the second is faster for sure: its workers wait beside each other.
SHORT = """budget="60s", trials=2, allow_busy=True, set={"num_workers": [0, 4]}, baseline=FIXED, fix=FIXED)"""
FIXED = """FIXED = {"batch_size": 16, "precision": "fp32", "compile_mode": "off", "optimizer_impl": "for-loop",
         "intra_op_threads": 1, "prefetch_factor": 2, "persistent_workers": True}"""
DEADLINE_S = 240


def run(folder: Path, *words: str) -> str:
    env = {**os.environ, "AUTOTUNE_STATE_DIR": str(folder / "state"), "IPYTHONDIR": str(folder), "HOME": str(folder)}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 60)
def test_the_pages_code_runs(tmp_path: Path) -> None:
    page = (DOCS / "python.md").read_text()
    code = "\n\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert code.count('budget="10m")') == 1 and "study.trials" in code and "strict=True" in code
    script = tmp_path / "train.py"
    shorter = code.replace('budget="10m")', SHORT)
    script.write_text(f"{FIXED}\n{shorter}\nprint(step, float(value) > 0, len(study.trials))\n")
    said = run(tmp_path, str(script))
    assert "<Study train_workload-1: " in said and "4 workers" in said
    assert "<Step of Sequential with SGD on cpu> True 2\n" in said


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("nbconvert", "nbformat", "ipykernel")),
    reason="needs nbconvert and ipykernel (pip install '.[notebook]')",
)
def test_the_notebook_runs(tmp_path: Path) -> None:
    import nbformat

    shutil.copy(DOCS / "notebook.ipynb", tmp_path)
    written = nbformat.read(tmp_path / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in written.cells), "the notebook is kept without outputs"
    options = ["--to", "notebook", "--execute", "--output", "done.ipynb"]
    run(tmp_path, "-m", "nbconvert", *options, "notebook.ipynb")
    cells = [c for c in nbformat.read(tmp_path / "done.ipynb", as_version=4).cells if c.cell_type == "code"]
    searched, trials, report, trained = (cell.outputs for cell in cells[-4:])
    # One output that was updated in place, in the end with what the search said; then the study.
    progress, study = searched
    assert progress.output_type == "display_data" and "2 trials were asked for" in progress.data["text/html"]
    assert study.data["text/plain"].startswith("<Study Net_workload-1: ") and "<table>" in study.data["text/html"]
    assert "num_workers" in trials[0].data["text/plain"]
    assert report[0].data["text/html"].startswith("<iframe ") and report[0].data["text/plain"].endswith("report.html")
    assert re.fullmatch(r"loss 2\.\d+ → \d\.\d+\n", trained[0].text)
