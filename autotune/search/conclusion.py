"""The finding of a search: what its measurements allow to be said of the baseline, or why they allow nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.base.errors import MachineError, NoVerdictError
from autotune.space.formatting import count, describe, interval_text, listed, ratio_text
from autotune.base.records import Finding, HeatEntrant, StudyHeat, TrainVerdict, Trial, TrialResult, TrialStatus
from autotune.space import Lessons, Space, device_part, key
from autotune.study.complete import is_device_bound
from autotune.search.verify import Proof
from autotune.search.verify.comparison import LEAST_LAUNCHES

#: With fewer configurations compared, that none was faster says nothing, unless there are no others.
HANDFUL = 5
#: If the interval of a configuration reaches above this speedup, it may be faster by an amount that matters.
MAY_BE_FASTER = 1.05
_UNKNOWN = (TrialStatus.INTERRUPTED, TrialStatus.KILLED, TrialStatus.TIMEOUT)
_EITHER = "a longer --budget, or a quieter machine, may tell them apart."
_QUIETER = "search again when the machine is quiet, or measure in spite of it with --allow-busy."


@dataclass(frozen=True)
class Conclusion:
    """A finding, and for what is not proven why it is not and what to do, one sentence each.

    Attributes:
        evidence: what something is likely by, as a phrase.
    """

    finding: Finding
    because: str | None = None
    advice: str | None = None
    evidence: str | None = None

    def likely_by(self, evidence: str | None) -> Conclusion:
        """Return what is concluded if something is likely by this evidence, or nothing is."""
        return self if evidence is None else replace(self, finding=Finding.LIKELY, evidence=evidence)


@dataclass(frozen=True)
class Coverage:
    """What the trials and heats say of the configurations other than the baseline.

    Attributes:
        tried: number of configurations with a rate of their own trial. measured: the same, and those that heats have
            compared, if those tell of the training. failed: number of those that cannot run here.
        disturbed: the last result of each configuration that others kept from being measured.
        everything: every legal configuration was measured, failed, or is ruled out by one that failed.
    """

    tried: int
    measured: int
    failed: int
    disturbed: tuple[TrialResult, ...]
    everything: bool

    @property
    def enough(self) -> bool:
        """Whether the comparisons suffice to say that nothing is faster."""
        known = self.measured + self.failed
        return self.everything or (known >= HANDFUL and known >= len(self.disturbed))


def coverage(space: Space, trials: Sequence[Trial], heats: Sequence[StudyHeat] = ()) -> Coverage:
    """Count what the trials and heats of a search compared with the baseline."""
    last = {key(t.config): t.result for t in trials if t.config and key(t.config) != key(space.baseline)}
    for trial in trials:
        # A result is not taken back by an attempt that was cut short later.
        if trial.config and key(trial.config) in last and _is_known(trial.result):
            last[key(trial.config)] = trial.result
    results = last.values()
    compared = [heat for heat in heats if heat.heat.side == "device"] if is_device_bound(space, trials) else []
    entrants = [e for heat in compared for e in heat.heat.entrants]
    tried = {name for name, r in last.items() if r.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED)}
    ran = tried | {key(e.config) for e in entrants if e.ratio is not None} - {key(space.baseline)}
    known = {name for name, result in last.items() if _is_known(result)} | ran | {key(space.baseline)}
    known |= {key(e.config) for e in entrants if e.status not in _UNKNOWN}
    lessons = Lessons()
    for entrant in entrants:
        lessons.learn(entrant.status, entrant.config, cannot_compile=entrant.cannot_compile, refuses=entrant.refuses)
    for trial in trials:
        if trial.config:
            end = trial.result
            lessons.learn(end.status, trial.config, cannot_compile=end.cannot_compile, refuses=end.refuses)
    return Coverage(
        tried=len(tried),
        measured=len(ran),
        failed=len(known - ran) - 1,
        disturbed=tuple(r for r in results if r.status is TrialStatus.INTERRUPTED and r.transient),
        everything=all(key(c) in known or lessons.rule_out(c) for c in space.grid()),
    )


def _untried(
    space: Space, trials: Sequence[Trial], heats: Sequence[StudyHeat], checks: Sequence[TrainVerdict]
) -> HeatEntrant | None:
    """Return an entrant that may be faster than the baseline, beside which it trained, and of whose device's part there
    is no trial; ``None`` if there is none. What trains wrongly does not count."""
    lessons = Lessons()
    for verdict in checks:
        if verdict.passed is False:
            lessons.learn_wrong(verdict.config)
    known = {key(device_part(t.config)) for t in trials if t.config and _is_known(t.result)}
    for heat in heats if is_device_bound(space, trials) else ():
        if heat.heat.side != "device":
            continue
        rows = {key(device_part(e.config)): e for e in heat.heat.entrants if e.ratio is not None}
        own = rows.get(key(device_part(space.baseline)))
        for part, one in rows.items():
            # Who dropped out is behind somebody else of them.
            left = one.status is TrialStatus.COMPLETE and part not in known and not lessons.is_wrong(one.config)
            if own is not None and left and (one.ratio or 0.0) > MAY_BE_FASTER * (own.ratio or math.inf):
                return one
    return None


def _is_known(result: TrialResult) -> bool:
    """Return whether a result says something of its configuration: it has a rate, or cannot run here.

    A timeout may be ours: a trial has at most the time that is left for searching.
    """
    return result.status not in _UNKNOWN


def raise_if_nothing_compared(
    space: Space,
    trials: Sequence[Trial],
    heats: Sequence[StudyHeat],
    stopped: str,
    *,
    trials_asked: int | None,
) -> None:
    """Raise if nothing but the baseline could be measured, although more was to be tried.

    Raises:
        MachineError: others kept the machine too busy. NoVerdictError: there was no time.
    """
    found = coverage(space, trials, heats)
    if found.tried or (found.enough and not heats) or trials_asked == 1:
        return
    nothing = "no verdict, because nothing but the baseline was measured"
    if found.disturbed:
        raise MachineError(f"{nothing}: {_disturbance(found)}", advice=_QUIETER)
    raise NoVerdictError(f"{nothing}: {stopped}", advice="allow it a longer --budget.")


def conclude(
    space: Space, trials: Sequence[Trial], heats: Sequence[StudyHeat], proof: Proof, *, by_rate: bool
) -> Conclusion:
    """Return the finding of a search whose proof is complete."""
    own = key(space.baseline)
    if any(key(s.config) != own for s in (proof.best, proof.best_same_batch)):
        return Conclusion(Finding.FASTER)
    found = coverage(space, trials, heats)
    others = [s for s in proof.finalists if key(s.config) != own and s.trial not in proof.dropped]
    if by_rate:
        open_ = [s for s in others if s.speedup_ci95[1] > MAY_BE_FASTER]
    else:
        open_ = [s for s in others if s.score > proof.baseline.score]
    if not found.enough and len(found.disturbed) > found.measured + found.failed:
        return Conclusion(Finding.OPEN, _disturbance(found), _QUIETER)
    if proof.unproven:
        who = f"trial{'' if len(proof.unproven) == 1 else 's'} {listed([str(n) for n in proof.unproven])}"
        because = f"{who} may be faster, and could not be launched again in turns with the baseline"
        return Conclusion(Finding.OPEN, because, _EITHER)
    if open_:
        best = max(open_, key=lambda s: s.speedup if by_rate else s.score)
        because = f"trial {best.trial} may be better, and was not shown to be"
        if by_rate:
            ran = f"trial {best.trial} ran at {ratio_text(best.speedup, best.speedup_ci95)} the baseline"
            interval = f"95 %: {interval_text(best.speedup_ci95)}"
            if min(best.launches, proof.baseline.launches) < LEAST_LAUNCHES:
                interval = "one launch"
            because = f"{ran} ({interval}), which is no proof of being faster"
            if best.speedup_ci95[0] > 1 and len(open_) > 1:
                # Shown for it alone, and it was picked as the fastest.
                because = (
                    f"{ran} ({interval}); of {len(open_)} compared one may seem so by luck, and more launches tell"
                )
        return Conclusion(Finding.OPEN, because, _EITHER)
    untried = _untried(space, trials, heats, proof.checks)
    if by_rate and untried is not None:
        what = describe(untried.config, space.baseline)
        return Conclusion(Finding.OPEN, f"{what} computed faster in a heat, and no trial of it was made", _EITHER)
    if not found.enough:
        known = found.measured + found.failed
        because = f"only {count(known, 'configuration')} {'was' if known == 1 else 'were'} compared with the baseline"
        return Conclusion(Finding.OPEN, because, "allow more: a longer --budget, more --trials.")
    return Conclusion(Finding.KEEP)


def _disturbance(found: Coverage) -> str:
    among = len(found.disturbed) + found.measured + found.failed
    cause = (found.disturbed[-1].cause or "others used the machine").partition(";")[0]
    return f"{len(found.disturbed)} of {count(among, 'other configuration')} could not be measured, because {cause}"
