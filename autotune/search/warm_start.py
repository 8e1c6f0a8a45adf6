"""Warm start: the winners of earlier studies are tried first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from autotune.errors import AutotuneError
from autotune.layout import StudyFiles
from autotune.records import Fingerprint, Outcome, StudySpec, Value
from autotune.space import Space, key
from autotune.study.reading import read_fingerprint, read_trials
from autotune.study.request import read_request

#: Maximum number of such configurations. Each costs a trial, and the sampler knows what usually wins without them.
MAX_WARM = 3
#: Maximum number from a forked study, which has measured the same workload.
MAX_FORKED = 5
#: Fingerprint values that must be equal for the hardware to count as the same.
_HARDWARE = ("gpu_model", "cpu_model", "cores")


def best_of(files: StudyFiles) -> list[dict[str, Value]]:
    """Return the best configurations of a study, finished or not, best first and without its baseline.

    Raises:
        MachineError: the study's database cannot be read.
    """
    trials = [t for t in read_trials(files) if t.score is not None]
    if not trials:
        return []
    baseline = key(trials[0].config)
    ranked = sorted((t for t in trials if key(t.config) != baseline), key=lambda t: -(t.score or 0.0))
    return [dict(t.config) for t in ranked[:MAX_FORKED]]


def winners_elsewhere(
    files: StudyFiles, spec: StudySpec, fingerprint: Fingerprint, space: Space, say: Callable[[str], None]
) -> list[dict[str, Value]]:
    """Return the winners of other studies in the same folder, as configurations of this space.

    Studies of this workload on any hardware come first, then studies of other workloads on this hardware. Studies that
    cannot be read are skipped.

    Args:
        say: called once with a sentence that names the studies.
    """
    found: dict[str, tuple[str, dict[str, Value]]] = {}
    for sibling in (False, True):
        for name, then, theirs, outcome in _others(files):
            same_workload = then.model == spec.model and then.args == spec.args
            same_hardware = theirs is not None and _hardware(theirs) == _hardware(fingerprint)
            fitting = same_hardware and not same_workload if sibling else same_workload
            best = space.completed(outcome.best.config)
            won = key(outcome.best.config) != key(outcome.baseline.config) and space.refusal(best) is None
            if fitting and then.objective == spec.objective and won and key(best) != key(space.baseline):
                found.setdefault(key(best), (name, best))
    chosen = list(found.values())[:MAX_WARM]
    if chosen:
        say(f"trying first what won in {', '.join(name for name, _ in chosen)}")
    return [config for _, config in chosen]


def _others(files: StudyFiles) -> Iterator[tuple[str, StudySpec, Fingerprint | None, Outcome]]:
    """Return the other finished studies in the folder, newest first."""
    found = []
    for request in files.folder.parent.glob("*/study.yaml"):
        other = StudyFiles(request.parent)
        if other.folder == files.folder or not other.outcome.is_file():
            continue
        # A damaged study must not prevent this search.
        with contextlib.suppress(AutotuneError, OSError, ValueError):
            outcome = Outcome.model_validate_json(other.outcome.read_text())
            found.append((other.name, read_request(other), read_fingerprint(other), outcome))
    return iter(sorted(found, key=lambda one: one[1].created, reverse=True))


def _hardware(fingerprint: Fingerprint) -> list[object]:
    return [fingerprint.values.get(name) for name in _HARDWARE]
