"""A knob is one file: the test adds a made-up one to a copy of the package, and the rest of autotune picks it up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import autotune
from autotune.knobs import KNOBS

pytestmark = pytest.mark.slow

PACKAGE = Path(autotune.__file__).parent

KNOB = '''
"""Whether PyTorch warns each time.

Helps: nobody. It is made up.

Hurts: nobody either.

Source: https://docs.pytorch.org/docs/stable/generated/torch.set_warn_always.html
"""

from autotune.knobs.knob import Knob
from autotune.knobs.knob import Maths, Scope


class WarnAlways(Knob):
    name = "warn_always"
    about = "a warning each time"
    scope = Scope.PROCESS
    values = (False, True)
    default = False
    maths = Maths.KERNELS

    def phrase(self, value):
        return "with all warnings" if value else "with each warning once"

    def apply_process(self, value):
        import torch

        torch.set_warn_always(bool(value))

    def read_process(self):
        import torch

        return torch.is_warn_always_enabled()

    def restore_process(self, before):
        import torch

        torch.set_warn_always(before)


KNOB = WarnAlways()
'''

#: A workload that is four times as fast with the knob as without.
WORKLOAD = """
import time

import torch
from torch import nn

BATCH_SIZE = 8


def model(ctx):
    print("warns always:", torch.is_warn_always_enabled())
    return nn.Linear(32, 4)


def dataset(ctx):
    inputs = torch.randn(4096, 32, generator=torch.Generator().manual_seed(ctx.seed))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :4].clone())


def optimizer(ctx, model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss(ctx, model, batch):
    time.sleep(0.005 if torch.is_warn_always_enabled() else 0.02)
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with one more knob, and a finished search for it."""
    folder = tmp_path_factory.mktemp("project")
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, folder / "autotune", ignore=without)
    for catalog in ("models", "objectives"):
        if (PACKAGE.parent / catalog).is_dir():
            shutil.copytree(PACKAGE.parent / catalog, folder / catalog, ignore=without)
    (folder / "autotune" / "knobs" / "warn_always.py").write_text(KNOB.lstrip())
    (folder / "slow.py").write_text(WORKLOAD)
    pinned = {"precision": "fp32", "compile_mode": "off", "memory_format": "contiguous", "num_workers": "0"}
    pinned |= {"batch_size": "8", "intra_op_threads": "1", "optimizer_impl": "for-loop"}
    fixed = [word for name, value in pinned.items() for word in ("--fix", f"{name}={value}")]
    fixed += [word for name, value in pinned.items() for word in ("--baseline", f"{name}={value}")]
    command(
        folder,
        "search",
        "--model",
        "slow.py",
        "--study",
        "one",
        "--budget",
        "60s",
        "--trials",
        "2",
        "--allow-busy",
        *fixed,
    )
    return folder


def command(project: Path, *words: str, module: str = "autotune") -> str:
    env = os.environ | {"PYTHONPATH": str(project), "AUTOTUNE_STATE_DIR": str(project / "state"), "COLUMNS": "200"}
    line = [sys.executable, "-P", "-m", module, *words]
    done = subprocess.run(line, cwd=project, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)
class TestAMadeUpKnob:
    def test_is_not_ours(self) -> None:
        assert "warn_always" not in KNOBS

    def test_is_in_the_space(self, project: Path) -> None:
        found = json.loads(command(project, "space", "--model", "slow.py", "--json"))
        choices = [choice["value"] for choice in found["knobs"]["warn_always"]["choices"]]
        assert choices == [False, True] and found["baseline"]["warn_always"] is False

    def test_is_searched_and_wins(self, project: Path) -> None:
        outcome = json.loads((project / "studies" / "one" / "outcome.json").read_text())
        assert outcome["best"]["config"]["warn_always"] is True
        assert outcome["baseline"]["config"]["warn_always"] is False
        assert outcome["best"]["speedup"] > 2

    def test_is_gated(self, project: Path) -> None:
        outcome = json.loads((project / "studies" / "one" / "outcome.json").read_text())
        (check,) = outcome["checks"]
        assert check["config"]["warn_always"] is True and check["passed"] is True

    def test_is_applied_in_the_trial(self, project: Path) -> None:
        trials = sorted((project / "studies" / "one" / "trials").iterdir())
        said = {
            json.loads((t / "spec.json").read_text())["config"]["warn_always"]: (t / "stdout.log").read_text()
            for t in trials
        }
        assert said == {False: "warns always: False\n", True: "warns always: True\n"}

    def test_is_applied_in_the_full_training(self, project: Path) -> None:
        profile = "studies/one/profile.yaml"
        assert "warns always: True" in command(project, "train", "--profile", profile, "--steps", "40")

    def test_is_worded(self, project: Path) -> None:
        assert "with all warnings" in command(project, "show", "one")
        assert "with all warnings" in command(project, "report", "one", "--full")

    def test_is_exported(self, project: Path) -> None:
        text = command(project, "export", "one")
        assert "warn_always: true" in text and "baseline: false" in text and "a warning each time" in text
        exported = json.loads(command(project, "export", "one", "--format", "json"))
        assert exported["configuration"]["warn_always"] is True
        # A tool cannot be told, and its export says so.
        told = command(project, "export", "one", "--format", "lightning")
        assert "warn_always=true: not known to this format; autotune.load_profile() applies it" in told

    def test_is_documented(self, project: Path) -> None:
        page = command(project, module="autotune.knobs")
        assert "## warn_always" in page and "Helps: nobody. It is made up." in page
