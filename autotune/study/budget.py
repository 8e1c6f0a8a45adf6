"""The seconds of a study, and the folder that is reserved for it. Texts such as ``10m`` are read by
`autotune.base.parsing`."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

from autotune.base.clock import Clock
from autotune.base.errors import MachineError, UsageError
from autotune.base.files import make_folder, write_atomic
from autotune.base.layout import StudyFiles
from autotune.base.records import Record
from autotune.space.formatting import seconds_text

# The seconds that a search may use, counted across interruptions.

#: At least this fraction of a budget is for searching; a search is also planned with it before its first trial.
SEARCH_SHARE = 0.4
#: The fraction of a budget up to which the best with the user's own batch size may take time from the proof, which
#: would otherwise have nothing to compare at that batch size.
ALONE_SHARE = 0.7
#: The proof takes about as long as this many trials: gate 4, race 8, holding 1, gains of the knobs 3, ceilings 2.
#: However large the budget, the proof benefits from this fraction of it.
PROOF_TRIALS, PROOF_PART = 18, 0.25
#: Least number of launches from the baseline's first to a verdict: another configuration, and two of each in turns. And
#: the number that check how a script's winner trains, each little more than a start: its own, and one of the script as
#: it stands.
VERDICT_LAUNCHES, CHECK_LAUNCHES = 5, 2
#: One launch of each does not show how much launches vary, so it proves nothing.
LEAST_LAUNCHES = 2
#: A command may exceed its budget by this many seconds or this fraction of it, whichever is more. Of these, the start
#: of Python, the end of the last processes and the report take about so many, and none of them is counted.
GRACE_S, GRACE = 5.0, 0.05
UNCOUNTED_S = 2.0
#: Seconds of the count that can be lost to a SIGKILL.
SAVE_EVERY_S = 5.0


def search_share(limit_s: float, trial_s: float) -> float:
    """Return the fraction of a budget that searching may take so that the rest suffices for the proof, where a usual
    trial takes ``trial_s``."""
    return max(SEARCH_SHARE, 1 - max(PROOF_PART, PROOF_TRIALS * trial_s / limit_s))


def lack(limit_s: float, spent_s: float, launch_s: float, check_s: float = 0.0) -> str | None:
    """Return a sentence on what a budget has no time for and which budget would have; ``None`` if there is time for
    all.

    Args:
        spent_s: seconds spent once the baseline has been measured. launch_s: duration of that launch. check_s: duration
            of one launch that checks how a script trains.
    """
    verdict_s = spent_s + VERDICT_LAUNCHES * launch_s
    checked_s = verdict_s + CHECK_LAUNCHES * check_s
    if checked_s <= limit_s:
        return None
    lacking = "a verdict, which takes" if verdict_s > limit_s else "the check of how a winner trains, which takes"
    more = VERDICT_LAUNCHES if verdict_s > limit_s else CHECK_LAUNCHES
    # Includes an extra quarter for the search itself.
    enough_s = 10 * math.ceil(1.25 * checked_s / 10)
    return (
        f"a launch takes {seconds_text(launch_s)} here, and the budget may have no time for {lacking} {more} more: "
        f"--budget {enough_s}s would"
    )


class Budget:
    """Counts monotonic seconds while the search runs, and keeps the count on disk.

    Args:
        limit_s: time allowed by the user, over all runs of the study.
    """

    def __init__(self, files: StudyFiles, limit_s: float, clock: Clock) -> None:
        self.limit_s = limit_s
        self._files = files
        self._clock = clock
        try:
            self._before_s = float(json.loads(files.spent.read_text())["spent_s"])
        except FileNotFoundError:
            self._before_s = 0.0
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise MachineError(
                f"{files.spent} cannot be read: {error}",
                advice='write {"spent_s": N} into it, N being the seconds the search has run.',
            ) from error
        self._began = self._saved_at = clock.now()
        self._paused_at: float | None = None
        self._paused_s = 0.0
        #: Seconds spent waiting in this run, which do not count.
        self.waited_s = 0.0

    @property
    def spent_s(self) -> float:
        """Seconds used so far, including earlier runs of the study."""
        now = self._clock.now() if self._paused_at is None else self._paused_at
        return self._before_s + now - self._began

    @property
    def left_s(self) -> float:
        return self.limit_s - self.spent_s

    @property
    def grace_s(self) -> float:
        """Seconds by which launches running at its end may exceed it."""
        return max(GRACE_S, GRACE * self.limit_s) - UNCOUNTED_S

    @property
    def is_paused(self) -> bool:
        return self._paused_at is not None

    def pause(self) -> None:
        """Stop counting while the search makes data or waits for others. Does nothing if the budget is paused."""
        if self._paused_at is None:
            self._paused_at = self._clock.now()

    def resume(self) -> None:
        """Start counting again. Does nothing if the budget is not paused."""
        if self._paused_at is not None:
            self._paused_s = self._clock.now() - self._paused_at
            self._began += self._paused_s
            self._paused_at = None

    def settle(self, waited_s: float) -> None:
        """Count the last pause after all, except for ``waited_s`` seconds of waiting, or all of it if it was
        shorter."""
        waited_s = min(waited_s, self._paused_s)
        self._began -= self._paused_s - waited_s
        self._paused_s = 0.0
        self.waited_s += waited_s

    def leave_out(self, seconds: float) -> None:
        """Leave the last seconds uncounted because the search could not go on. A paused budget has not counted them."""
        if self._paused_at is None:
            self._began += seconds

    def begin_again(self) -> None:
        """Reset the count to zero, and save it."""
        self._before_s, self._began = 0.0, self._clock.now()
        self.save()

    def tick(self) -> None:
        """Save the count if `SAVE_EVERY_S` have passed. Cheap; called several times a second."""
        if self._clock.now() - self._saved_at >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        self._saved_at = self._clock.now()
        write_atomic(self._files.spent, json.dumps({"spent_s": round(self.spent_s, 3)}))


# Reservations: the folder of a study is kept for a job of the daemon until the job begins its search.
#
# A job writes ``reserved.json`` into the folder, and a search writes ``study.yaml``. Each writes its own file first and
# then looks for the other's, so at least one of two that arrive at the same moment sees the other, and gives way before
# it has acknowledged or measured anything. This needs no lock, and therefore also works on network file systems.


class Reservation(Record):
    """The job for which a folder is kept: its number, the mark of the study that it will make, and the state folder of
    its daemon."""

    job: int
    mark: str
    daemon: str


def reserve(files: StudyFiles, reservation: Reservation) -> None:
    """Keep a folder for a job. The folder is created if it does not exist.

    Raises:
        UsageError: the folder holds a study.
        MachineError: the folder cannot be created or written.
    """
    make_folder(files.folder, "--studies-dir names another folder.")
    write_atomic(files.reservation, reservation.model_dump_json())
    if files.request.exists():
        files.reservation.unlink(missing_ok=True)
        raise UsageError(f"study {files.name!r} exists already", advice="another --study starts a new one.")


def reservation_of(files: StudyFiles) -> Reservation | None:
    """Return the reservation of a folder; ``None`` if there is none.

    Raises:
        UsageError: the file is not a reservation.
    """
    try:
        return Reservation.model_validate_json(files.reservation.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{files.reservation} cannot be read", advice="another --study starts a new study; or remove the file."
        ) from error


def refuse_reserved(files: StudyFiles, mark: str) -> None:
    """Refuse a study in a folder that is kept for another one.

    Raises:
        UsageError: the folder is kept for another study.
    """
    reservation = reservation_of(files)
    if reservation is not None and reservation.mark != mark:
        raise UsageError(
            f"study {files.name!r} is kept for job {reservation.job} of the daemon",
            advice=f"another --study starts a new one; `autotune jobs show {reservation.job}` says when the job runs.",
        )


def release(files: StudyFiles, mark: str) -> None:
    """Give up the reservation of a study, and remove its folder if nothing else is in it. Never raises."""
    with contextlib.suppress(OSError, UsageError):
        reservation = reservation_of(files)
        if reservation is not None and reservation.mark == mark:
            files.reservation.unlink(missing_ok=True)
        Path(files.folder).rmdir()
