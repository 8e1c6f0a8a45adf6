"""What a job in Slurm's queue does on its node: it continues its study each time Slurm starts the job.

submitit calls it in the batch script's own process. Slurm sends SIGUSR2 to that process shortly before the job's time
is up, and SIGTERM to every process of the job when the job is requeued, preempted or cancelled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.base.errors import INTERRUPTED, SIGNALS, AutotuneError, NoVerdictError
from autotune.base.files import exclusive_lock
from autotune.base.layout import StudyFiles
from autotune.cluster.slurm_commands import is_running

#: The signal that submitit requests from Slurm, and handles.
WARNING = signal.SIGUSR2
#: All signals that ask a job to end.
_ENDING = (*SIGNALS, signal.SIGUSR1, WARNING)


class StudyRun:
    """`autotune resume` of a study that `autotune submit --to slurm` has created. submitit pickles it.

    Args:
        study: absolute path of the study's folder, which every node sees.
        environment: variables of the search, in addition to the job's own.
    """

    def __init__(self, study: str, environment: Mapping[str, str]) -> None:
        self.study = study
        self.environment = dict(environment)

    def __call__(self) -> None:
        """Run the search to its end, and exit with its exit code if it has no answer.

        If a signal has ended it and Slurm does not restart the job by itself, submitit requeues the job.
        """
        # A node that Slurm has given up on may still be working on the study.
        with exclusive_lock(StudyFiles(Path(self.study)).lock, wait=True):
            pass
        requeue: Any = signal.getsignal(WARNING)
        code = self._search()
        # A signal that comes before the search listens for it ends it at once.
        code = code if code >= 0 else 128 - code
        if code in INTERRUPTED and self._goes_on():
            requeue(WARNING, None)
        if code not in (0, NoVerdictError.exit_code):
            sys.exit(code)

    def checkpoint(self) -> Any:
        """Return what submitit is to call when the job is restarted: this same call, since the study holds all
        progress."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _search(self) -> int:
        """Run the search, and ask it to end if this process is asked to. Return its exit code."""
        stop: Callable[[], None] | None = None
        stop_requested = False

        def end(_number: int, _frame: object) -> None:
            nonlocal stop_requested
            stop_requested = True
            if stop is not None:
                stop()

        for number in _ENDING:
            signal.signal(number, end)
        search = subprocess.Popen(
            [sys.executable, "-P", "-m", "autotune", "resume", self.study, "--no-input"],
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
        )
        stop = search.terminate
        if stop_requested:
            stop()
        return search.wait()

    def _goes_on(self) -> bool:
        """Return whether Slurm lets the job run on, in which case it ends for good unless it is requeued."""
        try:
            return is_running(int(os.environ["SLURM_JOB_ID"]))
        except AutotuneError:
            # Requeueing a job that Slurm has requeued itself does no harm.
            return True
