"""``python -m autotune.daemon.job FOLDER DEVICE MARK``: the process of one run of a job."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.base.clock import SystemClock
from autotune.base.errors import SIGNALS, AutotuneError, UsageError
from autotune.base.files import write_atomic
from autotune.base.layout import JobFiles, StudyFiles, find_daemon
from autotune.base.observer import Observer
from autotune.base.records import End, Job
from autotune.daemon.claims import adopt_orphans
from autotune.daemon.queue import read_job_file
from autotune.daemon.runner import LIMIT_YOURSELF, EventLog, changed_source, limit_process, write_end
from autotune.profile.in_force import Store
from autotune.search import Environment, resume, search
from autotune.search.replay import read_surface
from autotune.search.replay.run import replay_request, replayed_json
from autotune.space.formatting import standing_text
from autotune.study.request import read_request


def main(arguments: list[str]) -> int:
    """Run a job and write its end record.

    Args:
        arguments: the job's folder, ``cpu`` or a GPU's UUID, the run's mark, and optionally `LIMIT_YOURSELF`.

    Returns:
        The exit code of the equivalent ``autotune search``.
    """
    folder, device, mark, *limits = arguments
    files = JobFiles(Path(folder))
    # Orphans of the workload stay descendants of this process, so that the daemon can find them.
    adopt_orphans()
    received: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda n, _frame: received.append(n))
    try:
        job = read_job_file(files)
        if limits == [LIMIT_YOURSELF]:
            limit_process(job.request.host_memory_bytes, job.request.cores)
        with contextlib.closing(EventLog(files.events, SystemClock())) as observer:
            found = _run(job, files, device, observer, lambda: received[0] if received else None)
            end = End(mark=mark, exit_code=0, **found)
    except AutotuneError as error:
        print(f"autotune: {error}", file=sys.stderr)  # noqa: T201
        end = End(mark=mark, exit_code=error.exit_code, message=str(error), advice=error.advice)
    except Exception as error:
        traceback.print_exc()
        message = f"a fault of autotune's own: {type(error).__name__}: {error}"
        end = End(mark=mark, exit_code=AutotuneError.exit_code, message=message)
    with contextlib.suppress(AutotuneError):
        # On a full disk only the exit code reports the result.
        write_end(files, end)
    return end.exit_code


def _run(job: Job, files: JobFiles, device: str, observer: Observer, stop: Callable[[], int | None]) -> dict[str, Any]:
    """Run the search; return the fields of its end record that say what came of it."""
    request = job.request
    if request.replay is not None:
        path = Path(request.replay)
        surface = read_surface(path)
        space, outcome = replay_request(surface, request.spec, observer=observer, stop=stop)
        write_atomic(files.replayed, json.dumps(replayed_json(path, surface, space, outcome)))
        return {"found": standing_text(outcome.best, outcome.baseline)}
    env = Environment.real(observer, stop)
    study = StudyFiles(Path(request.studies_dir) / request.spec.name)
    if study.request.exists() and read_request(study).mark != request.spec.mark:
        raise UsageError(f"study {study.name!r} is that of another search", advice="submit again with another --study.")
    changed = changed_source(request)
    if changed is not None and not study.request.exists():
        raise UsageError(f"{changed} is not as it was when the job was submitted", advice="submit it again.")
    if study.request.exists():
        result = resume(study, env)
    else:
        # CUDA_VISIBLE_DEVICES hides the other GPUs.
        spec = request.spec.model_copy(update={"device": "cpu" if device == "cpu" else "cuda"})
        result = search(spec, Path(request.studies_dir), env)
    profile = result.profile
    if profile is None:
        return {"found": f"no verdict: {result.outcome.because}", "open": True}
    text = standing_text(result.outcome.best, result.outcome.baseline, result.outcome.evidence)
    if profile.behind_store is not None or result.outcome.evidence is not None:
        # It looks ahead, so it is not a profile to train with; or it is not proven, and stays with its study.
        return {"found": text}
    slot, entry = Store(find_daemon().profiles).keep(profile, instead_of=request.refreshes)
    verdict = f"; {entry.verdict}" if request.refreshes else ""
    return {"found": f"{text}{verdict}", "slot": slot}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
