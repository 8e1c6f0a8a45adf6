"""The read-only page as documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from autotune.base.observer import Silent
from autotune.base.records import ENDED, Config, Job, JobRow, JobState, Running, StudySpec, Trial
from autotune.daemon.job.runner import tell
from autotune.report.document import Column, Document, Grid, Kind, Links, Paragraph, Part, Section, facts
from autotune.space.formatting import count, describe, listed, one_line, seconds_text, trial_rate_text, unit_of

# The progress of a search, read from its event log.

#: Of a long event log, only the first line and this much of the end are read.
_TAIL_BYTES = 2**20


class Progress(Silent):
    """An observer that keeps the latest state of a search.

    Attributes:
        headline: model, device and data.
        doing: title of the current launch; empty if there is none.
        said: the last message.
        spent_s, budget_s: seconds of the budget spent, and in total.
        trials: the latest event of each trial, in order.
    """

    def __init__(self) -> None:
        self.headline = ""
        self.doing = ""
        self.said = ""
        self.spent_s = 0.0
        self.budget_s: float | None = None
        self._trials: dict[int, Trial] = {}

    @property
    def trials(self) -> list[Trial]:
        return [self._trials[number] for number in sorted(self._trials)]

    def begins(self, spec: StudySpec, headline: str) -> None:
        self.headline = headline

    def says(self, sentence: str) -> None:
        self.said = sentence

    def launch_begins(self, title: str, config: Config) -> None:
        self.doing = title

    def heat_begins(self, title: str, entrants: Sequence[Config]) -> None:
        self.doing = title

    def trial_ends(self, trial: Trial) -> None:
        self._trials[trial.number] = trial

    def clock(self, spent_s: float, budget_s: float) -> None:
        self.spent_s, self.budget_s = spent_s, budget_s

    def ends(self) -> None:
        self.doing = ""


def read_progress(events: Path) -> Progress:
    """Read the progress of a job's search. It is empty if the event log does not exist yet."""
    found = Progress()
    try:
        with events.open("rb") as stream:
            first = stream.readline()
            size = events.stat().st_size
            stream.seek(max(stream.tell(), size - _TAIL_BYTES))
            rest = stream.read(_TAIL_BYTES)
    except OSError:
        return found
    for line in [first, *rest.splitlines()]:
        tell(line.decode(errors="replace"), found)
    return found


# Builds the pages as documents.

#: Interval at which a page reloads, in seconds.
REFRESH_S = 5
#: Maximum number of rows shown of a long list.
MOST = 100
_WORD, _TEXT = Kind.WORD, Kind.TEXT


def overview(status: Mapping[str, Any], rows: list[JobRow], progress: Mapping[int, Progress]) -> Document:
    """Build the first page.

    Args:
        status: the daemon's status. rows: every job, in the order of the queue. progress: progress of running jobs.
    """
    counts = [f"{number} {state}" for state, number in status["jobs"].items() if number]
    running = [row for row in rows if row.state is JobState.RUNNING]
    waiting = [row for row in rows if row.state not in ENDED and row.state is not JobState.RUNNING]
    ended = sorted((row for row in rows if row.state in ENDED), key=lambda row: row.ended or "", reverse=True)
    state = Paragraph(
        f"The daemon is {status['state']}, for {seconds_text(status['uptime_s'])}: "
        f"{listed(counts) if counts else 'no job yet'}.",
        strong=True,
    )
    trouble = (Paragraph(f"Nothing is started: {status['trouble']}."),) if status["trouble"] else ()
    sections = [
        Section("Now", (state, *trouble, *map(Paragraph, status["notes"]))),
        Section("Devices", (_devices(status["devices"]),)),
        Section("Running", (_running(running, progress),) if running else (Paragraph("Nothing runs."),)),
    ]
    if waiting:
        sections.append(Section("Waiting", _jobs(waiting, "why")))
    if ended:
        sections.append(Section("Ended", _jobs(ended, "what came of it")))
    return Document("autotune", tuple(sections), REFRESH_S)


def one_job(
    job: Job, waits: str | None, progress: Progress, links: tuple[tuple[str, str], ...], answer: str | None = None
) -> Document:
    """Build the page of a job.

    Args:
        waits: why the job does not run, if it is queued. answer: of its study in one sentence, once that is finished.
    """
    status, request = job.status, job.request
    running = isinstance(status, Running)
    about = facts(
        ("state", job.state.value),
        ("what came of it", getattr(status, "found", None)),
        ("why", getattr(status, "why", None)),
        ("waits", waits),
        ("model", request.replay or request.spec.model),
        ("study", request.spec.name),
        ("device", getattr(status, "device", None) or job.placed),
        ("submitted", moment(job.submitted)),
        ("since", moment(getattr(status, "since", "") or getattr(status, "ended", ""))),
        ("ran", f"{count(job.runs, 'time')}, {seconds_text(job.spent_s)} in all" if job.runs else None),
        ("now", _doing(progress) if running else None),
    )
    told = (Paragraph(answer, strong=True),) if answer else ()
    sections = [Section("About", (*told, *about, *((Links(links),) if links else ())))]
    if progress.trials:
        sections.append(Section("Trials", (_trials(progress),)))
    return Document(f"Job {job.id}", tuple(sections), REFRESH_S if running else None)


def trouble(title: str, sentence: str) -> Document:
    """Build an error page."""
    return Document("autotune", (Section(title, (Paragraph(sentence), Links((("overview", "/"),)))),))


def moment(text: str) -> str:
    """Format a time for people, in the local time zone; empty if there is none."""
    return datetime.fromisoformat(text).astimezone().strftime("%d %b %H:%M") if text else ""


def _devices(devices: list[Mapping[str, Any]]) -> Part:
    columns = (Column("device", _WORD), Column("model", _WORD), Column("state", _WORD), Column("", _TEXT))
    rows = tuple((_short(d["name"]), d["model"], d["state"], d["why"] or "") for d in devices)
    return Grid(columns, rows) if rows else Paragraph("They have not been looked at yet.")


def _running(rows: list[JobRow], progress: Mapping[int, Progress]) -> Part:
    # Narrow screens hide the last columns.
    columns = (
        *(Column("job", _WORD), Column("study", _TEXT), Column("doing", _TEXT)),
        *(Column("time", _WORD), Column("trials"), Column("device", _WORD)),
    )
    told = [progress.get(row.id, Progress()) for row in rows]
    cells = tuple(
        (str(row.id), row.study, p.doing or p.said, _time(p), str(len(p.trials)), _short(row.device))
        for row, p in zip(rows, told, strict=True)
    )
    return Grid(columns, cells, links=tuple(f"/jobs/{row.id}" for row in rows))


def _jobs(rows: list[JobRow], why: str) -> tuple[Part, ...]:
    columns = (
        *(Column("job", _WORD), Column("study", _TEXT), Column(why, _TEXT)),
        *(Column("state", _WORD), Column("since", _WORD)),
    )
    shown = rows[:MOST]
    cells = tuple(
        (str(r.id), r.study, r.reason, r.state.value, moment(r.ended or r.since or r.submitted)) for r in shown
    )
    grid = Grid(columns, cells, links=tuple(f"/jobs/{row.id}" for row in shown))
    more = len(rows) - len(shown)
    return (grid, Paragraph(f"And {count(more, 'more job', 'more jobs')}.")) if more else (grid,)


def _trials(progress: Progress) -> Part:
    trials = progress.trials
    columns = (Column("trial"), Column("status", _WORD), Column(unit_of(trials)), Column("configuration", _TEXT))
    baseline = trials[0].config
    rows = tuple(
        (str(t.number), t.result.status.value, trial_rate_text(t), describe(t.config, baseline)) for t in trials
    )
    best = max((t.score for t in trials if t.score is not None), default=None)
    strong = frozenset(i for i, t in enumerate(trials) if best is not None and t.score == best)
    return Grid(columns, rows, strong=strong)


def _doing(progress: Progress) -> str | None:
    return one_line(", ".join(part for part in (_time(progress), progress.doing or progress.said) if part)) or None


def _time(progress: Progress) -> str:
    if progress.budget_s is None:
        return ""
    return f"{seconds_text(progress.spent_s)} of {seconds_text(progress.budget_s)}"


def _short(name: str | None) -> str:
    return "-".join((name or "").split("-")[:2])
