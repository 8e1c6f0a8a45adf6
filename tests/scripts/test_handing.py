"""What a model under autocast hands on, a loss takes in fp32: converted, or the precision is left to the script."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.base.records import TrialStatus

from .conftest import Runner, python

OUTSIDE = "its loss would be computed in bfloat16 outside of the model"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["object", "distribution", "named"])
def test_tensors_in_any_object_are_converted(run: Runner, how: str) -> None:
    ran = run.script("handing.py", how, precision="bf16")
    assert set(ran.seen["inside"]) == {"torch.bfloat16"} and set(ran.seen["outside"]) == {"torch.float32"}
    assert ran.stderr == "autotune: profile.yaml: bf16\n"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["attribute", "hook"])
def test_what_is_handed_on_beside_the_outputs_keeps_the_precision_of_the_script(run: Runner, how: str) -> None:
    ran = run.script("handing.py", how, precision="bf16")
    # The first step has been taken when that is seen.
    assert ran.seen["inside"][1:] == ran.seen["outside"][1:] == ["torch.float32"] * 11
    assert ran.stderr.startswith(f"autotune: profile.yaml: nothing to set; not bf16 ({OUTSIDE} (")


@pytest.mark.slow
def test_a_trial_of_it_has_failed(launched: Any) -> None:
    result = launched(*python("handing.py", "hook", "--until", "it-is-measured"), precision="bf16")
    assert result.status is TrialStatus.DIVERGED and result.cause.startswith(OUTSIDE)
    assert "return all that its loss is computed from" in result.advice
    assert launched(*python("handing.py", "hook", "--until", "it-is-measured")).status is TrialStatus.COMPLETE


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_training_that_goes_on_has_its_own_precision_back(run: Runner) -> None:
    words = ["--live", "--expect", "60s", "--allow", "precision"]
    command = [run.command()[0], "-P", "-m", "autotune", "run", *words, "--"]
    ran = run.run([*command, *python("handing.py", "attribute", "--until", "studies/handing-live-1/report.md")])
    assert set(ran.seen["outside"]) == {"torch.float32"}
    report = next((run.folder / "studies").iterdir()) / "report.md"
    assert f"bf16: no figure: RuntimeError: {OUTSIDE}" in report.read_text()
