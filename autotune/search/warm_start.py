"""Warm start: the winners of earlier studies are tried first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from autotune.base.errors import AutotuneError
from autotune.base.layout import StudyFiles
from autotune.base.records import Outcome, StudySpec, Value
from autotune.space import Space, key
from autotune.study.reading import read_trials
from autotune.study.request import read_request

#: Maximum number of such configurations. Each costs a trial, and the sampler knows what usually wins without them.
MAX_WARM = 3
#: Maximum number from a forked study, which has measured the same workload.
MAX_FORKED = 5


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
    files: StudyFiles, spec: StudySpec, space: Space, say: Callable[[str], None]
) -> list[dict[str, Value]]:
    """Return the winners of earlier studies of the same training in the same folder, on any hardware, as configurations
    of this space. What was only likely to be faster is none. Studies that cannot be read are skipped.

    Args:
        say: called once with a sentence that names the studies.
    """
    found: dict[str, tuple[str, dict[str, Value]]] = {}
    for name, then, outcome in _others(files):
        best = space.completed(outcome.best.config)
        won = outcome.evidence is None and key(outcome.best.config) != key(outcome.baseline.config)
        legal = space.refusal(best) is None and key(best) != key(space.baseline)
        if _is_alike(then, spec) and then.objective == spec.objective and won and legal:
            found.setdefault(key(best), (name, best))
    chosen = list(found.values())[:MAX_WARM]
    if chosen:
        say(f"trying first what won in {', '.join(name for name, _ in chosen)}")
    return [config for _, config in chosen]


def _is_alike(one: StudySpec, other: StudySpec) -> bool:
    """Return whether two studies are of the same training: of scripts, many are called train.py."""
    commands = [None if c is None else (c.folder, *c.words) for c in (one.command, other.command)]
    return one.model == other.model and one.args == other.args and commands[0] == commands[1]


def _others(files: StudyFiles) -> Iterator[tuple[str, StudySpec, Outcome]]:
    """Return the other finished studies in the folder, newest first."""
    found = []
    for request in files.folder.parent.glob("*/study.yaml"):
        other = StudyFiles(request.parent)
        if other.folder == files.folder or not other.outcome.is_file():
            continue
        # A damaged study must not prevent this search.
        with contextlib.suppress(AutotuneError, OSError, ValueError):
            outcome = Outcome.model_validate_json(other.outcome.read_text())
            found.append((other.name, read_request(other), outcome))
    return iter(sorted(found, key=lambda one: one[1].created, reverse=True))
