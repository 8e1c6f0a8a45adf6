"""A search while it runs."""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from autotune.base.clock import Clock
from autotune.base.observer import Observer
from autotune.base.records import Beat, Config, StudyHeat, StudySpec, Trial, TrialStatus
from autotune.knobs.compile_mode import phase_text
from autotune.report.document import wrapped
from autotune.space.formatting import (
    alone,
    count,
    counts_text,
    describe,
    ended_text,
    memory_text,
    one_line,
    rate_text,
    ratio_text,
    seconds_text,
    settings,
    status_style,
    trial_peak_bytes,
    trial_rate_text,
    unit_of,
)

#: Number of entrants of a heat that are listed, fastest first.
_NAMED = 3


class Leaderboard:
    """The standing of a heat that is running, from its beats.

    Args:
        entrants: the first is the reference.
    """

    def __init__(self, entrants: Sequence[Config]) -> None:
        self._entrants = entrants
        self._logs: dict[int, list[float]] = {}

    def __len__(self) -> int:
        return len(self._entrants)

    def add(self, beat: Beat) -> None:
        if beat.turn is not None and beat.rate_per_s:
            self._logs.setdefault(beat.turn, []).append(math.log(beat.rate_per_s))

    def leaders(self) -> list[tuple[float, Config]]:
        """Return the fastest so far, each with its rate relative to the reference's; rough, as they ran at different
        moments."""
        reference = self._logs.get(0)
        if reference is None:
            return []
        ratios = [(math.exp(fmean(logs) - fmean(reference)), self._entrants[i]) for i, logs in self._logs.items()]
        return sorted(ratios, key=lambda pair: -pair[0])[:_NAMED]


class Tally:
    """The search's trials so far, its baseline and its best trial."""

    def __init__(self) -> None:
        self.baseline: Trial | None = None
        self.best: Trial | None = None
        self._baseline_config: Config | None = None
        self._statuses: dict[int, TrialStatus] = {}
        #: Titles of the launches that have begun in this run of the search.
        self.begun: set[str] = set()

    def begins(self, title: str, config: Config) -> None:
        """Record that a launch begins. The first launch with a configuration runs the baseline."""
        self.begun.add(title)
        if self._baseline_config is None and config:
            self._baseline_config = dict(config)

    def beside(self, title: str) -> int:
        """Return the number of trials that run at the same time as the launch with this title."""
        ended = {f"trial {number}" for number in self._statuses}
        return sum(other.startswith("trial ") for other in self.begun - ended - {title})

    def add(self, trial: Trial) -> None:
        self._statuses[trial.number] = trial.result.status
        if trial.number == 0:
            self._baseline_config = trial.config
        if trial.score is None:
            return
        # An interrupted baseline is repeated under another trial number.
        if self.baseline is None and trial.config == self._baseline_config:
            self.baseline = trial
        if self.best is None or self.best.score is None or trial.score > self.best.score:
            self.best = trial

    @property
    def unit(self) -> str:
        """The unit of rates; empty while it is unknown."""
        return unit_of([self.baseline]) if self.baseline is not None else ""

    @property
    def counts(self) -> Counter[str]:
        return Counter(status.value for status in self._statuses.values())

    def what(self, config: Config) -> str:
        """Describe a configuration by its differences from the baseline."""
        if self._baseline_config is None or config == self._baseline_config:
            return f"baseline: {settings(config)}"
        return describe(config, self._baseline_config)

    def told(self, heat: StudyHeat) -> str:
        entrants = heat.heat.entrants
        measured = sorted((e for e in entrants if e.ratio is not None), key=lambda e: -(e.ratio or 0.0))
        if len(measured) < 2:
            return f"heat {heat.number} showed nothing: {heat.heat.ended}"
        leaders = [f"{ratio_text(e.ratio or 1.0, e.ratio_ci95)} {self.what(e.config)}" for e in measured[:_NAMED]]
        failed = Counter(e.status.value for e in entrants if e.ratio is None)
        others = f" ({counts_text(failed)})" if failed else ""
        return (
            f"heat {heat.number}: {count(len(entrants), 'configuration')}{others} in {seconds_text(heat.wall_s)}; "
            f"{alone(heat.heat.side)}, relative to {self.what(heat.heat.reference.config)}: {'; '.join(leaders)}"
        )


# Progress of a search on stderr: a live panel on a terminal, plain lines elsewhere.
#
# The search's own thread draws the panel, at most every `MIN_GAP_S` and only when its content has changed, because the
# trials are measured on the same cores. An error in this module never ends a search: after a failed write, the stream
# is not written to again.

#: Minimum time between two drawings, in seconds.
MIN_GAP_S = 0.5
_LAST = 3
#: Width of the labels, and minimum width of a panel in which lines wrap: in a narrower one they would fill the screen.
_LABEL, _ROOM = 8, 40


def observer_for(stderr_is_terminal: bool, clock: Clock) -> Observer:
    """Return the live panel for a terminal that supports it, otherwise plain lines."""
    console = PanelConsole(stderr=True, force_terminal=stderr_is_terminal, highlight=False)
    return LivePanel(clock, console) if console.is_interactive else PlainLines()


class PanelConsole(Console):
    """A console that stops writing when its pipe is closed."""

    def on_broken_pipe(self) -> None:
        # rich's own handler would redirect stdout, which carries the data, to /dev/null and exit.
        self.quiet = True


class LivePanel(Observer):
    """Draws one panel that is updated in place, and removes it when the search ends.

    Args:
        clock: limits how often the panel is drawn.
        console: a terminal. On anything else only the sentences passed to `says` appear.
    """

    def __init__(self, clock: Clock, console: PanelConsole) -> None:
        self._clock = clock
        self._console = console
        self._live: Live | None = None
        self._ended = False
        self._drawn: tuple[str, str, int] | None = None
        self._drawn_at = float("-inf")
        self._progress = Tally()
        self._last: deque[Trial] = deque(maxlen=_LAST)
        self._headline = ""
        self._title = ""
        self._config: Config = {}
        self._beat: Beat | None = None
        self._board: Leaderboard | None = None
        self._data: tuple[int, int] | None = None
        self._spent_s, self._budget_s = 0.0, 0.0

    def begins(self, spec: StudySpec, headline: str) -> None:
        self._headline = one_line(headline)
        self._budget_s = spec.budget_s
        self._ended = False
        self._draw()

    def says(self, sentence: str) -> None:
        # rich prints this above the panel.
        with self._without_errors():
            self._console.print(Text(one_line(sentence)))

    def data_progress(self, done: int, total: int) -> None:
        self._data = (done, total)
        self._draw()

    def launch_begins(self, title: str, config: Config) -> None:
        self._progress.begins(title, config)
        self._title, self._config, self._beat, self._data = one_line(title), dict(config), None, None
        self._board = None
        self._draw()

    def heat_begins(self, title: str, entrants: Sequence[Config]) -> None:
        self.launch_begins(title, entrants[0])
        self._board = Leaderboard(entrants)

    def beat(self, beat: Beat) -> None:
        self._beat = beat
        if self._board is not None:
            self._board.add(beat)
        self._draw()

    def trial_ends(self, trial: Trial) -> None:
        self._progress.add(trial)
        self._last.append(trial)
        self._draw()

    def heat_ends(self, heat: StudyHeat) -> None:
        if heat.title in self._progress.begun:
            self.says(self._progress.told(heat))

    def clock(self, spent_s: float, budget_s: float) -> None:
        self._spent_s, self._budget_s = spent_s, budget_s
        self._draw()

    def ends(self) -> None:
        self._ended = True
        live, self._live = self._live, None
        if live is not None:
            # The cursor must be restored even after an error while drawing.
            self._console.quiet = False
            with self._without_errors():
                live.stop()

    def _draw(self) -> None:
        now = self._clock.now()
        if self._ended or self._console.quiet or now - self._drawn_at < MIN_GAP_S:
            return
        self._drawn_at = now
        with self._without_errors():
            width = self._console.width
            content = self.content(max(8, width - 3))
            drawn = (self._headline, content.plain, width)
            if drawn == self._drawn:
                return
            self._drawn = drawn
            title = Text(self._headline, style="bold", overflow="ellipsis")
            # The margin keeps ^C, echoed after the last line, from wrapping: the panel could not be erased completely.
            self._show(Panel(content, title=title, title_align="left", border_style="dim", width=max(8, width - 3)))

    def _show(self, panel: Panel) -> None:
        if self._live is None:
            # Use no thread, and do not redirect stdout, which carries the data.
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(panel, refresh=True)

    @contextmanager
    def _without_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            # A closed terminal or an error while drawing must not end a search that may have run for hours.
            self._console.quiet = True

    def content(self, width: int) -> Text:
        """Return the panel's lines for a terminal of ``width`` columns. Lines wrap, unless it is too narrow."""
        text = Text()
        if cell_len(self._headline) > width - 4:
            # It does not fit into the frame.
            text.append(self._headline, style="bold")
        if self._data is not None:
            _label(text, "data")
            text.append_text(_bar(*self._data, width))
            text.append(f" {self._data[0]:,} of {count(self._data[1], 'file')}")
        else:
            self._now(text)
        self._best(text)
        counts = self._progress.counts
        if counts:
            _label(text, "trials")
            text.append(f"{counts.total()}: {counts_text(counts)}")
        self._finished(text)
        if self._budget_s > 0:
            _label(text, "time")
            text.append_text(_bar(self._spent_s, self._budget_s, width))
            left = int(max(0.0, self._budget_s - self._spent_s))
            text.append(f" {f'{left} s' if left < 60 else seconds_text(left)} left of {seconds_text(self._budget_s)}")
        return _wrapped(text, width)

    def _now(self, text: Text) -> None:
        _label(text, "now")
        text.append(self._title or "starting", style="bold")
        beat = self._beat
        if beat is not None:
            text.append(f" · {phase_text(beat.phase, self._config)}", style="cyan")
            text.append(f", step {beat.step:,}" if beat.step else "")
            if self._board is None and beat.rate_per_s is not None:
                text.append(f" · {rate_text(beat.rate_per_s)} {self._progress.unit}".rstrip())
            text.append("" if beat.memory_bytes is None else f" · {memory_text(beat.memory_bytes)}")
            text.append("" if beat.loss is None else f" · loss {beat.loss:.3g}")
        others = self._progress.beside(self._title)
        text.append(f" · {count(others, 'trial')} beside it" if others else "")
        if self._board is not None:
            _label(text, "")
            text.append(f"{count(len(self._board), 'configuration')} in turns, relative to ")
            text.append(self._progress.what(self._config))
            for ratio, config in self._board.leaders():
                _label(text, "")
                text.append(f"~{ratio:.2f}×", style="bold")
                text.append(f" {self._progress.what(config)}")
        elif self._config:
            _label(text, "")
            text.append(self._progress.what(self._config))

    def _best(self, text: Text) -> None:
        best, baseline = self._progress.best, self._progress.baseline
        if best is None:
            return
        _label(text, "best")
        text.append(f"{trial_rate_text(best)} {self._progress.unit}", style="bold green")
        if baseline is not None and best is not baseline:
            # No ratio: the two launches ran at different times.
            text.append(f" · the baseline {trial_rate_text(baseline)}")
        text.append(f" · trial {best.number}")
        _label(text, "")
        text.append(self._progress.what(best.config))

    def _finished(self, text: Text) -> None:
        trials = list(reversed(self._last))
        ended = [ended_text(t) for t in trials]
        rates = ["" if t.rate_per_s is None else trial_rate_text(t) for t in trials]
        for i, trial in enumerate(trials):
            _label(text, "" if i else "last")
            text.append(f"{trial.number:>{len(str(max(t.number for t in trials)))}}  ")
            text.append(ended[i].ljust(max(map(len, ended))), style=status_style(trial.result.status))
            if any(rates):
                text.append(f"  {rates[i]:>{max(map(len, rates))}}")
            text.append(f"  {self._progress.what(trial.config)}")


class PlainLines(Observer):
    """Writes one line per event, each with the part of the budget used so far as ``[mm:ss]``.

    Args:
        stream: the output; stderr by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream: TextIO | None = stream or sys.stderr
        self._progress = Tally()
        self._kept = 0
        self._tenth = -1
        self._spent_s = 0.0

    def begins(self, spec: StudySpec, headline: str) -> None:
        self._write(f"{spec.name}: {headline}" if spec.name else headline)

    def says(self, sentence: str) -> None:
        self._write(sentence)

    def data_progress(self, done: int, total: int) -> None:
        tenth = done * 10 // total if total > 0 else 10
        if tenth != self._tenth:
            self._tenth = tenth
            self._write(f"making data: {tenth * 10} %, {done:,} of {count(total, 'file')}")

    def launch_begins(self, title: str, config: Config) -> None:
        if self._kept:
            best = self._progress.best
            suffix = "" if best is None else f"; best: {self._figures(best)}, {self._progress.what(best.config)}"
            self._write(f"{count(self._kept, 'trial')} kept: {counts_text(self._progress.counts)}{suffix}")
            self._kept = 0
        self._progress.begins(title, config)
        self._write(f"{title} begins: {self._progress.what(config)}" if config else title)

    def heat_begins(self, title: str, entrants: Sequence[Config]) -> None:
        self._progress.begins(title, entrants[0])
        reference = self._progress.what(entrants[0])
        self._write(f"{title} begins: {count(len(entrants), 'configuration')} in turns, the first of them {reference}")

    def trial_ends(self, trial: Trial) -> None:
        self._progress.add(trial)
        if f"trial {trial.number}" not in self._progress.begun:
            # Trials from an earlier run of this study are summed up in one line.
            self._kept += 1
            return
        parts = [self._figures(trial), memory_text(trial_peak_bytes(trial)), seconds_text(trial.result.wall_s)]
        figures = ", ".join(part for part in parts if part not in ("", "-"))
        cause = f": {trial.result.cause}" if trial.result.cause else ""
        self._write(f"trial {trial.number} {ended_text(trial)}, {figures}{cause}")

    def heat_ends(self, heat: StudyHeat) -> None:
        if heat.title in self._progress.begun:
            self._write(self._progress.told(heat))

    def _figures(self, trial: Trial) -> str:
        return "" if trial.rate_per_s is None else f"{trial_rate_text(trial)} {self._progress.unit}"

    def clock(self, spent_s: float, budget_s: float) -> None:
        self._spent_s = spent_s

    def _write(self, line: str) -> None:
        if self._stream is None:
            return
        minutes, seconds = divmod(int(self._spent_s), 60)
        try:
            self._stream.write(f"[{minutes:02}:{seconds:02}] {one_line(line)}\n")
            self._stream.flush()
        except (OSError, ValueError):
            # ValueError: the stream is closed. The search continues without output.
            self._stream = None


def _label(text: Text, label: str) -> None:
    """Start a line of the panel with its label."""
    text.append("\n" if text else "")
    text.append(f"{label:<{_LABEL}}", style="dim")


def _wrapped(text: Text, width: int) -> Text:
    """Wrap each line, with continuation lines indented to the right of the label."""
    lines = []
    for line in text.split("\n"):
        parts = wrapped(line, width - _LABEL) if width >= _ROOM and line.cell_len > width else [line]
        for i, part in enumerate(parts):
            lines.append(Text.assemble(" " * _LABEL, part) if i else part)
    return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def _bar(done: float, total: float, width: int) -> Text:
    cells = max(5, min(40, width - 45))
    full = min(cells, int(cells * done / total)) if total > 0 else 0
    return Text.assemble(("━" * full, "green"), ("─" * (cells - full), "dim"))
