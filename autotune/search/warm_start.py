"""Where to begin: what won in earlier studies is tried first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from autotune.errors import AutotuneError
from autotune.layout import StudyFiles
from autotune.records import Fingerprint, Outcome, StudySpec, Value
from autotune.space import Space, key
from autotune.study.history import read_fingerprint, read_trials
from autotune.study.request import read_request

#: So many at the most: each costs a trial, and the sampler knows what usually wins without them.
MOST = 3
#: Of a study that is forked: it measured this very workload.
MOST_FORKED = 5
#: What makes another machine's device another one.
_HARDWARE = ("gpu_model", "cpu_model", "cores")


def best_of(files: StudyFiles) -> list[dict[str, Value]]:
    """The best configurations of a study, finished or not, the best first; without its baseline.

    Raises:
        MachineError: its database cannot be read.
    """
    trials = [t for t in read_trials(files) if t.score is not None]
    if not trials:
        return []
    baseline = key(trials[0].config)
    ranked = sorted((t for t in trials if key(t.config) != baseline), key=lambda t: -(t.score or 0.0))
    return [dict(t.config) for t in ranked[:MOST_FORKED]]


def won_elsewhere(
    files: StudyFiles, spec: StudySpec, fingerprint: Fingerprint, space: Space, say: Callable[[str], None]
) -> list[dict[str, Value]]:
    """What won in the other studies of the same folder: of this workload on any hardware first, then of others on this
    hardware; as configurations of this space. A study that cannot be read is passed over.

    Args:
        say: told once which studies these are.
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
    chosen = list(found.values())[:MOST]
    if chosen:
        say(f"trying first what won in {', '.join(name for name, _ in chosen)}")
    return [config for _, config in chosen]


def _others(files: StudyFiles) -> Iterator[tuple[str, StudySpec, Fingerprint | None, Outcome]]:
    """The finished studies beside this one, the newest first."""
    found = []
    for request in files.folder.parent.glob("*/study.yaml"):
        other = StudyFiles(request.parent)
        if other.folder == files.folder or not other.outcome.is_file():
            continue
        # A damaged study elsewhere is no reason not to search here.
        with contextlib.suppress(AutotuneError, OSError, ValueError):
            outcome = Outcome.model_validate_json(other.outcome.read_text())
            found.append((other.name, read_request(other), read_fingerprint(other), outcome))
    return iter(sorted(found, key=lambda one: one[1].created, reverse=True))


def _hardware(fingerprint: Fingerprint) -> list[object]:
    return [fingerprint.values.get(name) for name in _HARDWARE]
