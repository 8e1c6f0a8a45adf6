"""Pictures as data, and drawn."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from autotune.space.formatting import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Matplotlib's SVG as an element of a page, in the page's own colours and font.

#: Number of colours in the style sheet: ``--c0``, ``--c1``, …
COLOURS = 6
#: Placeholder colours, replaced by the page's own, light or dark, once the picture is in the page.
_PAGE = {
    **{f"#0a000{i}": f"--{name}" for i, name in enumerate(("text", "faint", "line", "strong"), 1)},
    **{f"#0a001{i}": f"--c{i}" for i in range(COLOURS)},
}
_OF = {variable: colour for colour, variable in _PAGE.items()}
TEXT, FAINT, LINE, STRONG = (_OF[f"--{name}"] for name in ("text", "faint", "line", "strong"))


def colour_of(index: int) -> str:
    """Return the placeholder for a colour of the page."""
    return _OF[f"--c{index % COLOURS}"]


def inline(svg: str, about: str) -> str:
    """Return an SVG file as an element of a page: no prologue, style sheet, description or unused names.

    Args:
        about: its alternative text.
    """
    svg = svg[svg.index("<svg") :]
    for extra in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r"<!--.*?-->"):
        svg = re.sub(extra, "", svg, flags=re.DOTALL)
    svg = re.sub(r"\n\s*", " ", svg)
    used = set(re.findall(r"(?:url\(|href=\")#([\w-]+)", svg))
    # Replace only inside tags, so that text stays as it is.
    svg = re.sub(r"<[^<>]+>", lambda tag: _for_the_page(tag[0], used), svg)
    box = re.search(r'viewBox="[^"]+"', svg)
    label = one_line(about).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    head = f'<svg class="plot" role="img" aria-label="{label}" {box[0] if box else ""}>'
    return re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1)


def _for_the_page(tag: str, used: set[str]) -> str:
    """Give a tag the page's colours and font, and remove its id if nothing refers to it."""
    tag = re.sub(r' id="([\w-]+)"', lambda match: match[0] if match[1] in used else "", tag)
    for colour, variable in _PAGE.items():
        tag = tag.replace(colour, f"var({variable})")
    # The layout used the widths of a font that is wider than those of most systems, so no text overflows its place.
    return re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", tag)


# What a picture shows, as numbers: charts, waterfalls, intervals and stacked bars. None of it is markup.

#: How the points of a series are drawn. A line joins its points, steps keep a value until the next one.
Mark = Literal["dots", "rings", "triangles", "crosses", "line", "steps"]
#: A figure with the ends of its 95 % interval; ``None`` if they are unknown.
Estimate = tuple[float, float | None, float | None]


@dataclass(frozen=True)
class Axis:
    """An axis with its unit in its title.

    Attributes:
        ticks: values that were tried; if given, only these are labelled.
        log: whether it is logarithmic, which is for positive values only.
    """

    title: str
    ticks: tuple[float, ...] = ()
    log: bool = False


@dataclass(frozen=True)
class Series:
    """Points ``(x, y)`` of one kind. Crosses have no height: they mark what failed at this x.

    Attributes:
        name: its entry in the legend; empty for a series that continues another one, in the same colour.
        colour: index of a colour of the page.
    """

    name: str
    mark: Mark
    points: tuple[tuple[float, float], ...]
    colour: int = 0


@dataclass(frozen=True)
class Level:
    """A horizontal line with its interval as a band, such as a ceiling or a limit."""

    name: str
    at: Estimate
    colour: int = 0


@dataclass(frozen=True)
class Panel:
    """One plot of a chart. The panels of a chart are stacked and share its x axis."""

    y: Axis
    series: tuple[Series, ...]
    levels: tuple[Level, ...] = ()


@dataclass(frozen=True)
class Span:
    """A shaded interval of the x axis."""

    begin: float
    end: float


@dataclass(frozen=True)
class Chart:
    """Points and curves over a common x axis.

    Attributes:
        zero: whether the x axis begins at 0.
        spans: shaded intervals; spans_are: what they stand for.
        here: a highlighted value of x; here_is: what it stands for.
        note: anything else the reader should know, shown below the legend.
    """

    x: Axis
    panels: tuple[Panel, ...]
    zero: bool = False
    spans: tuple[Span, ...] = ()
    spans_are: str = ""
    here: float | None = None
    here_is: str = ""
    note: str = ""


@dataclass(frozen=True)
class Factor:
    """A step of a waterfall, which multiplies the value before it. The rest is what no other step accounts for."""

    name: str
    factor: Estimate
    rest: bool = False


@dataclass(frozen=True)
class Waterfall:
    """Factors that lead from 1 to `total`, on a logarithmic axis, where equal lengths mean equal factors."""

    axis: str
    begin: str
    factors: tuple[Factor, ...]
    end: str
    total: Estimate


@dataclass(frozen=True)
class IntervalRow:
    """A row of intervals: a figure with its interval. A faint one is shown with the others but does not count."""

    name: str
    at: Estimate
    strong: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Intervals:
    """Figures with their 95 % intervals, one below the other."""

    axis: str
    rows: tuple[IntervalRow, ...]


@dataclass(frozen=True)
class Stacks:
    """Horizontal bars that consist of parts.

    Attributes:
        rows: ``(name, values of the parts)``.
    """

    axis: str
    parts: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]


Plot = Chart | Waterfall | Intervals | Stacks

# Draws pictures as SVG for a page: text as text, in the page's own colours, the same bytes for the same numbers.
#
# Matplotlib draws them, because it gets axes right (ticks, logarithms, intervals, labels that do not overlap), its SVG
# has no script, and a page of eight pictures stays below 150 kB. Libraries that draw in the browser (Vega, Plotly,
# Bokeh, ECharts) put 0.8 to 4 MB of script into each page, and show nothing where scripts are blocked, as on the
# daemon's page or in an email. Matplotlib is imported only when a picture is drawn, and the settings of a notebook that
# also uses it are left untouched.
#
# A figure is 360 units wide, about the width of a phone in pixels, and is scaled up from there: its text is never
# smaller than the page's small print.

#: Dash patterns, as multiples of a line's width. They distinguish curves without colour; the first is solid.
DASHES: tuple[tuple[float, ...], ...] = (
    *((), (4, 2), (1.5, 1.5), (6, 2, 1.5, 2), (3, 3), (8, 2, 1.5, 2, 1.5, 2), (1, 3), (9, 3)),
)
_WIDTH = 360
_MARKS = {"dots": "o", "rings": "o", "triangles": "v"}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "font.size": 10.5,
    "text.color": TEXT,
    "axes.facecolor": "none",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "figure.constrained_layout.use": True,
}
#: Heights in rows of bars, in units of the figure: a line of the row's name above its bar, the bar, the gap to the next
#: row, and the space below all rows.
_LINE_HEIGHT, _BAR, _GAP, _BELOW = 13, 11, 7, 40
#: Maximum number of letters in a line and in a bold line, and of lines in a name.
_LETTERS, _BOLD_LETTERS, _LINES = 54, 48, 3
#: Larger values are not drawn, so that the arithmetic of the axes stays finite.
_LARGEST = 1e100


@dataclass(frozen=True)
class Key:
    """An entry of a legend.

    Attributes:
        mark: one of a series, or ``bar``, ``band``, ``span``, ``here`` or ``note`` (no mark).
        dashes: of a line, in SVG's notation.
    """

    name: str
    mark: str
    colour: int
    dashes: str = ""


@dataclass(frozen=True)
class Drawing:
    """A picture as SVG, and its legend, which the page renders."""

    svg: str
    legend: tuple[Key, ...] = ()


def draw(plot: Plot, title: str, about: str) -> Drawing:
    """Draw a picture.

    Args:
        title: distinguishes it from the page's other pictures. about: its alternative text.

    Raises:
        Exception: Matplotlib is missing or fails in any way; nothing else depends on it.
    """
    with _silent():
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

    with _silent(), matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_STYLE, "svg.hashsalt": one_line(title)})
        figure = Figure(facecolor="none")
        legend = _DRAWERS[type(plot)](figure, plot)
        file = io.StringIO()
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return Drawing(inline(file.getvalue(), about), tuple(legend))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silence Matplotlib's messages on its font cache, and on letters that its font lacks but the reader's may have."""
    logger = logging.getLogger("matplotlib")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _resize(figure: Figure, height: float) -> None:
    figure.set_size_inches(_WIDTH / 72, height / 72)


def _chart(figure: Figure, chart: Chart) -> list[Key]:
    _resize(figure, 190 if len(chart.panels) == 1 else 145 * len(chart.panels))
    plots = figure.subplots(len(chart.panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(plots, chart.panels, strict=True):
        for span in chart.spans:
            axes.axvspan(span.begin, span.end, color=STRONG, linewidth=0)
        if chart.here is not None:
            axes.axvline(chart.here, color=FAINT, linewidth=1, dashes=(2, 2))
        _panel(axes, panel)
    last = plots[-1]
    last.set_xlabel(one_line(chart.x.title))
    if chart.zero:
        last.set_xlim(left=0)
    if chart.x.log:
        last.set_xscale("log")
        last.xaxis.set_major_formatter(_plain)
    if chart.x.ticks:
        last.set_xticks(chart.x.ticks, [f"{tick:g}" for tick in chart.x.ticks])
        last.set_xticks([], minor=True)
    figure.align_ylabels()
    named = [series for panel in chart.panels for series in panel.series if series.name]
    keys = [Key(s.name, s.mark, s.colour % COLOURS, dashes_of(s.colour) if s.mark == "line" else "") for s in named]
    keys += [Key(level.name, "band", level.colour) for panel in chart.panels for level in panel.levels]
    keys += [Key(chart.spans_are, "span", 0)] if chart.spans else []
    keys += [Key(chart.here_is, "here", 0)] if chart.here is not None else []
    keys += [Key(chart.note, "note", 0)] if chart.note else []
    return list(dict.fromkeys(keys))


def _panel(axes: Axes, panel: Panel) -> None:
    axes.set_ylabel(one_line(panel.y.title))
    if panel.y.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_plain)
        axes.yaxis.set_minor_formatter(_few)
    for level in panel.levels:
        middle, low, high = level.at
        axes.axhline(middle, color=colour_of(level.colour), linewidth=1.2, dashes=(6, 2))
        if low is not None and high is not None:
            axes.axhspan(low, high, color=colour_of(level.colour), alpha=0.15, linewidth=0)
    for series in panel.series:
        _series(axes, series)
    if panel.y.log:
        low, high = axes.get_ylim()
        # Crosses for failures go below everything that has a value.
        axes.set_ylim(low / 1.8 if any(series.mark == "crosses" for series in panel.series) else low, high)
    elif panel.levels or any(series.mark != "line" for series in panel.series):
        # The heights of curves matter less than their shapes, which a scale from zero would flatten. A user's objective
        # may be negative.
        low, high = axes.get_ylim()
        heights = [y for series in panel.series for _, y in series.points]
        axes.set_ylim(low if min(heights, default=0.0) < 0 else 0, high if max(heights, default=1.0) > 0 else 0)


def _series(axes: Axes, series: Series) -> None:
    colour = colour_of(series.colour)
    xs, ys = [x for x, _ in series.points], [y if abs(y) <= _LARGEST else math.nan for _, y in series.points]
    if series.mark == "crosses":
        axes.plot(xs, [0.05] * len(xs), "x", color=colour, transform=axes.get_xaxis_transform(), zorder=4)
    elif series.mark == "line":
        dashes = DASHES[series.colour % len(DASHES)]
        (drawn,) = axes.plot(xs, ys, color=colour, solid_joinstyle="round")
        if dashes:
            drawn.set_dashes(dashes)
        # Mark where the line ends, and points that stand alone between values that are not numbers.
        ends = [i for i, y in enumerate(ys) if not math.isnan(y) and (i + 1 == len(ys) or math.isnan(ys[i + 1]))]
        axes.plot([xs[i] for i in ends], [ys[i] for i in ends], "o", color=colour, markersize=3.5)
    elif series.mark == "steps":
        axes.step(xs, ys, where="post", color=colour)
    else:
        filled = colour if series.mark != "rings" else "none"
        axes.plot(xs, ys, _MARKS[series.mark], color=colour, markerfacecolor=filled, markersize=5, zorder=3)


def dashes_of(colour: int) -> str:
    """Return the dashes of a legend's line of this colour, in SVG's notation."""
    return " ".join(f"{2 * dash:g}" for dash in DASHES[colour % len(DASHES)])


def _plain(value: float, _position: float | None = None) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _few(value: float, _position: float | None = None) -> str:
    """Label only 2 and 5 between powers of ten."""
    return _plain(value) if f"{value:.0e}"[0] in "25" else ""


def _rows(figure: Figure, names: Sequence[tuple[str, bool]], axis: str) -> tuple[Axes, list[float]]:
    """Prepare axes with a row for each name, which goes above its bar: on a phone there is no room beside it.

    Args:
        names: with whether each is emphasized.

    Returns:
        the axes, whose heights are in units of the figure, and the height of the middle of each bar.
    """
    letters = {True: _BOLD_LETTERS, False: _LETTERS}
    shortened = partial(textwrap.wrap, max_lines=_LINES, placeholder=" …")
    lines = [shortened(one_line(name), letters[strong]) or [""] for name, strong in names]
    height = sum(len(wrapped) * _LINE_HEIGHT + _BAR + _GAP for wrapped in lines)
    _resize(figure, height + _BELOW)
    axes: Axes = figure.subplots()
    axes.set_ylim(0, height)
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(one_line(axis))
    bars = []
    for wrapped, (_, strong) in zip(lines, names, strict=True):
        for line in wrapped:
            height -= _LINE_HEIGHT
            # Keep the name out of the constrained layout, which would narrow the axes to make room for a long one.
            weight = "bold" if strong else "normal"
            text = axes.text(
                0.0, height + 3, line, transform=axes.get_yaxis_transform(), fontsize=10, fontweight=weight
            )
            text.set_in_layout(False)
        bars.append(height - _BAR / 2)
        height -= _BAR + _GAP
    return axes, bars


def _whisker(axes: Axes, height: float, at: Estimate, colour: str) -> None:
    middle, low, high = at
    if low is not None and high is not None:
        axes.plot([low, high], [height, height], color=colour, linewidth=2, solid_capstyle="butt", zorder=3)
        axes.plot([low, high], [height, height], "|", color=colour, markersize=8, zorder=3)
    axes.plot([middle], [height], "o", color=colour, markersize=5, zorder=4)


def _intervals(figure: Figure, plot: Intervals) -> list[Key]:
    axes, heights = _rows(figure, [(row.name, row.strong) for row in plot.rows], plot.axis)
    for height, row in zip(heights, plot.rows, strict=True):
        _whisker(axes, height, row.at, FAINT if row.faint else colour_of(1 if row.strong else 0))
    return []


def _waterfall(figure: Figure, plot: Waterfall) -> list[Key]:
    names = [(plot.begin, False), *((factor.name, False) for factor in plot.factors), (plot.end, True)]
    axes, heights = _rows(figure, names, plot.axis)
    axes.set_xscale("log")
    axes.axvline(1, color=FAINT, linewidth=1)
    axes.plot([1], heights[:1], "o", color=colour_of(0), markersize=5)
    reached, above = 1.0, heights[0]
    for height, factor in zip(heights[1:], plot.factors, strict=False):
        ratio, low, high = factor.factor
        colour = FAINT if factor.rest else colour_of(3 if ratio >= 1 else 2)
        axes.plot([reached, reached], [above, height], color=LINE, linewidth=1, zorder=1)
        axes.barh(height, reached * ratio - reached, left=reached, height=_BAR, color=colour, alpha=0.75)
        if low is not None and high is not None:
            ends = [reached * low, reached * high]
            axes.plot(ends, [height, height], color=TEXT, linewidth=1)
            axes.plot(ends, [height, height], "|", color=TEXT, markersize=7)
        reached, above = reached * ratio, height
    axes.plot([reached, reached], [above, heights[-1]], color=LINE, linewidth=1, zorder=1)
    axes.barh(heights[-1], plot.total[0] - 1, left=1, height=_BAR, color=colour_of(1), alpha=0.35)
    _whisker(axes, heights[-1], plot.total, colour_of(1))
    ticks = _ratios(*axes.get_xlim())
    axes.set_xticks(ticks, [f"{_plain(ratio)}×" for ratio in ticks])
    axes.set_xticks([], minor=True)
    return []


def _ratios(low: float, high: float) -> list[float]:
    """Return about five round ratios from ``low`` to ``high``."""
    for steps in ((1, 1.2, 1.5, 2, 3, 5, 7), (1, 1.5, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ratios = sorted(step * 10.0**power for power in range(-3, 7) for step in steps)
        visible = [ratio for ratio in ratios if low <= ratio <= high]
        if len(visible) <= 6:
            break
    return visible


def _stacks(figure: Figure, plot: Stacks) -> list[Key]:
    axes, heights = _rows(figure, [(name, False) for name, _ in plot.rows], plot.axis)
    for height, (_, values) in zip(heights, plot.rows, strict=True):
        begin = 0.0
        for part, value in enumerate(values, 1):
            axes.barh(height, value, left=begin, height=_BAR, color=colour_of(part), linewidth=0)
            begin += value
    axes.set_xlim(left=0)
    return [Key(name, "bar", part % COLOURS) for part, name in enumerate(plot.parts, 1)]


_DRAWERS: dict[type, Callable[[Any, Any], list[Key]]] = {
    Chart: _chart,
    Waterfall: _waterfall,
    Intervals: _intervals,
    Stacks: _stacks,
}
