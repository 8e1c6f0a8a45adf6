"""``autotune verify`` on the finished search: real launches, and exit codes that scripts can rely on."""

from __future__ import annotations

import json

import pytest

from .conftest import Finished

PROFILE = "studies/my_tiny_net-1/profile.yaml"


@pytest.mark.slow
def test_a_promise_is_checked_by_launching_it_again(finished: Finished) -> None:
    done = finished.project.run("verify", "--profile", PROFILE, "--budget", "12s", "--allow-busy", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == {True: 0, False: 1, None: 8}[found["kept"]], done.stderr
    assert found["promised"]["speedup"] == pytest.approx(json.loads(finished.done.stdout)["best"]["speedup"], rel=1e-4)
    assert found["launches"] >= 1 and found["now"]["samples_per_second"] > 0
    low, high = found["ratio_ci95"]
    assert low <= found["ratio"] <= high and found["failed"] is None
    assert found["differences"] == []
    # The launches of verify are not kept.
    assert sorted(p.name for p in (finished.project.folder / "studies").iterdir()) == ["my_tiny_net-1"]


@pytest.mark.stress
def test_more_than_was_promised_is_not_kept(finished: Finished) -> None:
    """The test raises the promise in the file, so that no launch can keep it."""
    text = (finished.project.folder / PROFILE).read_text()
    profile = json.loads(finished.done.stdout)["best"]
    raised = finished.project.folder / "raised.yaml"
    lines = []
    section = ""
    for line in text.splitlines():
        section = line if line and not line.startswith((" ", "#")) else section
        if section.startswith("gives:") and line.lstrip().startswith(("samples_per_second:", "speedup:")):
            name, _, _ = line.partition(":")
            line = f"{name}: {1000 * profile['samples_per_second']:.6g}"
        lines.append(line)
    raised.write_text("\n".join(lines) + "\n")
    done = finished.project.run("verify", "--profile", "raised.yaml", "--budget", "6s", "--allow-busy")
    assert done.returncode == 1, done.stderr
    first, _, verdict, cause, *_ = done.stdout.splitlines()
    assert first.startswith("promised ") and verdict.startswith("broken ") and "is wanted" in verdict
    assert cause.startswith("because   the profile has been changed since it was written")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--profile", "nowhere.yaml"], 2, "there is no profile nowhere.yaml"),
        (["--profile", PROFILE, "--budget", "soon"], 2, "--budget 'soon' is no duration"),
        (["--profile", PROFILE, "--model", "nosuchnet"], 2, "nosuchnet"),
        (["--profile", PROFILE, "--at-least", "3"], 2, "--at-least"),
    ],
)
def test_bad_input_is_one_sentence(finished: Finished, arguments: list[str], code: int, says: str) -> None:
    done = finished.project.typed("verify", *arguments)
    assert done.returncode == code and says in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr
