"""Searches whose launches run on the nodes of a real Ray cluster: nodes that die, and a search that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from autotune.base.layout import STATE_DIR, StudyFiles
from autotune.profile import read
from autotune.space import key
from autotune.study.history import read_launches
from autotune.study.request import read_request
from autotune.study.tables import read_trials

from ..process.alive import marked, measuring, wait_until  # noqa: TID252
from .conftest import SHORT
from .ray_cluster import BESIDES, NODES, RayCluster, missing, ray_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
#: Two such searches fit on a node.
SEARCH = ("search", *SHORT, "--on-resources", "CPU=1", "--workers", "1")


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    why = missing()
    if why is not None:
        pytest.skip(why)
    with ray_cluster() as cluster:
        yield cluster


@dataclass
class Project:
    """A user's project, and the commands that run in it."""

    folder: Path
    cluster: RayCluster
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def begin(self, study: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a command for a study."""
        with (self.folder / f"{study}.log").open("ab") as log:
            self.running[study] = subprocess.Popen(
                [sys.executable, "-P", "-m", "autotune", *words],
                cwd=self.folder,
                env={**self.cluster.env, STATE_DIR: str(self.folder / "state")},
                stdout=log,
                stderr=log,
            )
        return self.running[study]

    def files(self, study: str) -> StudyFiles:
        return StudyFiles(self.folder / "studies" / study)

    def log(self, study: str) -> str:
        return (self.folder / f"{study}.log").read_text()

    def processes(self, study: str) -> set[int]:
        """Return the processes of a study's launches, on whatever node."""
        files = self.files(study)
        return set(marked(read_request(files).mark)) if files.request.exists() else set()

    def until_measuring(self, study: str, *, after: int) -> None:
        """Wait until a launch of a study runs, and so many of its launches have a result."""

        def holds() -> bool:
            assert self.running[study].poll() is None, self.log(study)
            return measuring(self.files(study), after) and bool(self.processes(study))

        wait_until(holds, 120)


@pytest.fixture
def project(ray: RayCluster, tmp_path: Path, workloads: Path) -> Iterator[Project]:
    (tmp_path / "tiny.py").write_text((workloads / "tiny.py").read_text())
    made = Project(tmp_path, ray)
    yield made
    for process in made.running.values():
        process.kill()
        process.wait()


def assert_done_once(project: Project, study: str) -> None:
    files = project.files(study)
    assert read(files.profile).provenance.study == study
    finished = Counter(key(t.config) for t in read_trials(files) if t.result.status != "interrupted")
    assert finished and max(finished.values()) == 1, f"measured twice: {finished.most_common(2)}"
    # With one worker, one launch at a time.
    spans = sorted((r.began_s, r.began_s + r.wall_s) for _, r in read_launches(files) if r.began_s is not None)
    assert all(ended <= began + 0.1 for (_, ended), (began, _) in pairwise(spans))


@pytest.mark.stress  # two minutes
def test_four_searches_on_three_nodes_with_all_that_happens_to_them(ray: RayCluster, project: Project) -> None:
    names = ("one", "two", "three", "four")
    for name in names:
        project.begin(name, *SEARCH, "--on", ray.client if name == "two" else "ray", "--study", name)
    for name in names:
        project.until_measuring(name, after=1)
    # The search itself is killed: nothing of it goes on.
    project.running["one"].kill()
    project.running["one"].wait()
    wait_until(lambda: not project.processes("one"), 60)
    # A node dies in the middle of launches. It is not the head, without which there is no cluster.
    others = set().union(*map(project.processes, names[1:]))
    number = next(n for n in range(1, NODES) if others & ray.processes_of(n))
    ray.kill(number)
    project.begin("one", "resume", "one")
    ray.start(number)
    for name in names:
        assert project.running[name].wait(200) == 0, project.log(name)
    for name in names:
        assert_done_once(project, name)
        assert not project.processes(name)
    assert any("is lost" in project.log(name) and "runs again elsewhere" in project.log(name) for name in names[1:])


def test_a_node_dies_in_mid_launch_and_ctrl_c_ends_the_rest(ray: RayCluster, project: Project) -> None:
    running = project.begin("one", *SEARCH, "--on", "ray", "--on-resources", f"{BESIDES}=1", "--study", "one")
    project.until_measuring("one", after=1)
    # Some of the marked processes are the search's own, here.
    on = {n: project.processes("one") & ray.processes_of(n) for n in range(1, NODES)}
    number = next(n for n in on if on[n])
    ray.kill(number)
    wait_until(lambda: "is lost" in project.log("one"), 60)
    assert "00000 runs again elsewhere" in project.log("one")
    wait_until(lambda: not on[number] & project.processes("one"))
    project.until_measuring("one", after=1)
    assert not (project.files("one").trials / "00001").exists()
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130, project.log("one")
    wait_until(lambda: not project.processes("one"))
    lacking = project.begin("two", *SEARCH, "--on", "ray", "--on-resources", "h100=1", "--study", "two")
    assert lacking.wait(60) == 5
    assert "no node of the Ray cluster has what is asked for (CPU and h100)" in project.log("two")


def test_without_ray(tmp_path: Path, workloads: Path) -> None:
    (tmp_path / "tiny.py").write_text((workloads / "tiny.py").read_text())
    (tmp_path / "ray.py").write_text("raise ImportError\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "autotune", *SEARCH, "--on", "ray://127.0.0.1:10001"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 5 and "Ray is not installed here" in done.stderr and "Traceback" not in done.stderr
