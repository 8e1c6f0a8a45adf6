"""The wheel: built offline, installed beside a user's package called ``models``, and used for a search."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import autotune

REPOSITORY = Path(autotune.__file__).parent.parent
WORKLOAD = '''\
"""Classifies points on two rings; brings its own data."""

import math
import time

import torch
from torch import nn
from torch.utils.data import Dataset

import autotune
import models

print(autotune.__file__, flush=True)
BATCH_SIZE = 16
KNOBS = {"noise": (0.1, 0.2), "pause": autotune.knob(True, False, changes_maths=False)}


class Rings(Dataset):
    def __init__(self, seed, noise):
        self.seed, self.noise = seed, noise

    def __len__(self):
        return 2048

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed + index)
        label = index % 2
        angle = 2 * math.pi * torch.rand((), generator=generator)
        point = (1 + label) * torch.stack([angle.cos(), angle.sin()])
        return point + self.noise * torch.randn(2, generator=generator), label


def model(ctx):
    return models.network(nn)


def dataset(ctx):
    return Rings(ctx.seed, float(ctx.knob("noise")))


def optimizer(ctx, m):
    return torch.optim.AdamW(m.parameters())


def loss(ctx, m, batch):
    points, labels = batch
    # Both sleep more than they compute, so that other load hardly changes their ratio.
    time.sleep(0.02 if ctx.knob("pause") else 0.004)
    return nn.functional.cross_entropy(m(points), labels)
'''

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None or not (REPOSITORY / "pyproject.toml").is_file(),
    reason="needs hatchling (pip install '.[test]') and a checkout to build the wheel from",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the wheel installs, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    options = ["--no-deps", "--no-index", "--disable-pip-version-check", "--quiet", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("their") / "project"
    (folder / "models").mkdir(parents=True)
    (folder / "models" / "__init__.py").write_text("def network(nn):\n    return nn.Linear(2, 2)\n")
    (folder / "my_rings.py").write_text(WORKLOAD)
    return folder


def python(installed: Path, project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run with the wheel's autotune ahead of the checkout's, and without the working folder on ``sys.path``."""
    env = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=False, timeout=120)


def test_the_catalogs_are_inside_the_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"autotune"}
    for kind in ("models", "objectives"):
        here = {f"autotune/_catalog/{kind}/{path.name}" for path in (REPOSITORY / kind).glob("*.py")}
        assert here and {n for n in names if n.startswith(f"autotune/_catalog/{kind}/")} == here
    assert "autotune/_catalog/models/resnet50.py" in names
    assert "autotune/py.typed" in names
    sources = {p.relative_to(REPOSITORY).as_posix() for p in (REPOSITORY / "autotune").rglob("*.py")}
    templates = {p.relative_to(REPOSITORY).as_posix() for p in (REPOSITORY / "autotune").rglob("templates/*")}
    assert templates and sources | templates <= names


def test_the_console_script_and_the_licence_are_there(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            name.rsplit("/", 1)[1]: archive.read(name).decode() for name in archive.namelist() if "dist-info" in name
        }
    assert "autotune = autotune.cli.main:main" in texts["entry_points.txt"]
    assert "LICENSE" in texts
    assert "Requires-Python: >=3.11" in texts["METADATA"]


def test_its_catalog_is_its_own_and_models_is_the_users(installed: Path, project: Path) -> None:
    code = (
        "import json, sys\n"
        "import autotune\n"
        "from autotune.workload.catalog import catalog_folder, find_workload, objective_names\n"
        "sys.path.append('.')\n"
        "import models\n"
        "print(json.dumps([autotune.__file__, str(catalog_folder('models')), find_workload('resnet50', {}).path,\n"
        "                  models.__file__, objective_names()]))\n"
    )
    done = python(installed, project, "-c", code)
    assert done.returncode == 0, done.stderr
    package, catalog, resnet50, theirs, objectives = json.loads(done.stdout)
    assert Path(package) == installed / "autotune" / "__init__.py"
    assert Path(catalog) == installed / "autotune" / "_catalog" / "models"
    assert Path(resnet50) == installed / "autotune" / "_catalog" / "models" / "resnet50.py"
    assert Path(theirs).samefile(project / "models" / "__init__.py")
    assert "throughput" in objectives


@pytest.mark.slow
def test_a_users_own_workload_is_searched_from_the_wheel(installed: Path, project: Path) -> None:
    options = ["--device", "cpu", "--budget", "45s", "--trials", "2", "--allow-busy", "--json"]
    options += ["--fix", "compile_mode=off", "--fix", "workload.pause=false", "--set", "num_workers=0"]
    options += ["--fix", "precision=fp32", "--fix", "optimizer_impl=for-loop", "--keep-batch-size"]
    done = python(installed, project, "-m", "autotune", "search", "--model", "my_rings.py", *options)
    # So short a search need not end with a verdict, and then there is no profile.
    assert done.returncode in (0, 8), done.stderr
    found = json.loads(done.stdout)
    assert found["state"] == "done" and found["trials"]["complete"] >= 1
    assert found["baseline"]["config"]["workload.noise"] == 0.1
    profile = project / "studies" / "my_rings-1" / "profile.yaml"
    assert profile.is_file() == (done.returncode == 0)
    assert found["profile"] == (str(profile) if profile.is_file() else None)
    # The wheel's code ran, in the children too.
    said = (project / "studies" / "my_rings-1" / "trials" / "00000" / "stdout.log").read_text()
    assert said.splitlines()[0] == str(installed / "autotune" / "__init__.py")
