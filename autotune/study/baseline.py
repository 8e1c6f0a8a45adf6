"""The error for a baseline that cannot be measured."""

from __future__ import annotations

from autotune.base.errors import AutotuneError, MachineError, WorkloadError
from autotune.knobs.compile_mode import phase_clause
from autotune.base.records import ATTEMPTS, Config, Phase, TrialResult, TrialStatus


def is_verdict(result: TrialResult) -> bool:
    """Return whether a launch ended by itself, as opposed to being killed or interrupted."""
    return result.status is not TrialStatus.INTERRUPTED or result.transient


def baseline_failed(result: TrialResult, config: Config) -> AutotuneError:
    """Return the error for a failed baseline, with the last lines of the child's output."""
    if result.status is TrialStatus.INTERRUPTED:
        return MachineError(
            f"the machine is too busy to measure: {result.cause}",
            advice=f"{result.advice or ''} `autotune resume` launches the baseline again.".strip(),
        )
    again = f", {ATTEMPTS} times in a row" if result.transient else ""
    where = phase_clause(result.phase or Phase.LOAD, config)
    return WorkloadError(
        f"the baseline ended as {result.status} in {where}{again}: {result.cause}",
        advice=result.advice,
        detail=result.evidence,
    )
