"""A report as one self-contained HTML page: no script, nothing loaded from elsewhere, light and dark, and printable.

Every text is escaped: a cause, a path or a model's name is shown as it is and never becomes markup.
"""

from __future__ import annotations

from autotune.report.chart import chart, escape
from autotune.report.document import Column, Commands, Curves, Document, Facts, Grid, Links, Paragraph, Part

#: Wide tables scroll inside their own box, so that the page itself never does; a shade at its edge says that there is
#: more. Paper is always light.
_STYLE = """\
:root {
  color-scheme: light dark;
  --ground: #fff; --text: #1b2127; --faint: #5a6570; --line: #d9dee3; --tint: #f3f5f7; --accent: #0b66b5;
  --strong: #e9f2fb; --c0: #1b2127; --c1: #0b66b5; --c2: #b8430b; --c3: #1c7a3e; --c4: #8a3ab0; --c5: #9a6a00;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --ground: #14181c; --text: #e1e6ea; --faint: #9aa5af; --line: #353d45; --tint: #1d2328; --accent: #6cb2f2;
    --strong: #172a3c; --c0: #e1e6ea; --c1: #6cb2f2; --c2: #f28b5b; --c3: #6fcf8f; --c4: #cf9bee; --c5: #e0b34d;
  }
}
* { box-sizing: border-box; }
html { background: var(--ground); color: var(--text); -webkit-text-size-adjust: 100%; }
body {
  max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; font: 1rem/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; font-variant-numeric: tabular-nums;
}
h1 { margin: 0 0 1.5rem; font-size: 1.5rem; line-height: 1.25; text-wrap: balance; }
h2 { margin: 2.25rem 0 .75rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); font-size: 1.15rem; }
p { max-width: 48rem; margin: .75rem 0; }
p.strong {
  max-width: none; padding: .6rem .9rem; border-left: .25rem solid var(--accent); background: var(--strong);
}
strong { font-weight: 600; }
dl { display: grid; grid-template-columns: fit-content(14rem) 1fr; gap: .3rem 1.25rem; margin: .75rem 0; }
dt { color: var(--faint); }
dd { margin: 0; }
.scroll {
  overflow-x: auto; margin: .9rem 0;
  background: linear-gradient(var(--ground), var(--ground)) right / 1rem 100% no-repeat local,
    linear-gradient(to left, var(--line), transparent) right / 1rem 100% no-repeat scroll;
}
table { border-collapse: collapse; font-size: .9rem; line-height: 1.4; overflow-wrap: normal; }
th, td { padding: .35rem .75rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { border-bottom-color: var(--faint); color: var(--faint); font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { padding-left: .5rem; }
.figure { text-align: right; white-space: nowrap; }
.word { white-space: nowrap; }
td.text { min-width: 14rem; overflow-wrap: anywhere; }
tr.strong { background: var(--strong); font-weight: 600; }
tr.total td { border-top: 1px solid var(--faint); border-bottom: 0; font-weight: 600; }
pre {
  overflow-x: auto; margin: .9rem 0; padding: .75rem .9rem; border: 1px solid var(--line); border-radius: .3rem;
  background: var(--tint); font: .875rem/1.6 ui-monospace, monospace;
}
code { font: inherit; }
a { color: var(--accent); }
ul { padding-left: 1.2rem; }
figure { margin: 1rem 0; }
figure svg.chart { display: block; width: 100%; max-width: 30rem; height: auto; }
figcaption ul { margin: .4rem 0 0; padding: 0; list-style: none; font-size: .9rem; }
figcaption svg { width: 2.5rem; height: .75rem; margin-right: .5rem; vertical-align: middle; }
svg text { fill: var(--faint); font: 11px system-ui, sans-serif; }
.axis { fill: none; stroke: var(--faint); }
.curve { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
@media (max-width: 30rem) {
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .5rem; }
  td.text { min-width: 9rem; }
}
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  h2 { break-after: avoid; }
  tr, figure, p, pre { break-inside: avoid; }
  .scroll { overflow: visible; background: none; }
  table { font-size: 8pt; }
  th, td { padding: .2rem .4rem; }
  td.text { min-width: 8rem; }
  pre { white-space: pre-wrap; }
  figure svg.chart { max-width: 20rem; }
  p.strong, tr.strong { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def to_html(document: Document) -> str:
    """The report as a whole HTML page, ending with a line break."""
    title = escape(document.title)
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        *([f'<meta http-equiv="refresh" content="{document.refresh_s}">'] if document.refresh_s else []),
        f"<title>{title}</title>",
        f"<style>\n{_STYLE}</style>",
        "</head>",
        "<body>",
        "<main>",
        f"<h1>{title}</h1>",
    ]
    for section in document.sections:
        lines += ["<section>", f"<h2>{escape(section.title)}</h2>", *map(_part, section.parts), "</section>"]
    return "\n".join([*lines, "</main>", "</body>", "</html>"]) + "\n"


def _part(part: Part) -> str:
    match part:
        case Paragraph():
            text = escape(part.text)
            return f'<p class="strong"><strong>{text}</strong></p>' if part.strong else f"<p>{text}</p>"
        case Facts():
            rows = (f"<dt>{escape(name)}</dt><dd>{escape(what)}</dd>" for name, what in part.rows)
            return "\n".join(["<dl>", *rows, "</dl>"])
        case Grid():
            return _grid(part)
        case Curves():
            return chart(part)
        case Commands():
            lines = "\n".join(map(escape, part.lines))
            return f"<pre><code>{lines}</code></pre>"
        case Links():
            items = (f'<li><a href="{escape(where)}">{escape(what)}</a></li>' for what, where in part.rows)
            return "\n".join(["<ul>", *items, "</ul>"])


def _grid(part: Grid) -> str:
    head = (f'<th scope="col"{_class(column)}>{_title(column)}</th>' for column in part.columns)
    rows = []
    for i, row in enumerate(part.rows):
        last = part.total and i == len(part.rows) - 1
        kind = ' class="total"' if last else ' class="strong"' if i in part.strong else ""
        cells = [escape(cell) for cell in row]
        if part.links:
            cells[0] = f'<a href="{escape(part.links[i])}">{cells[0]}</a>'
        columns = "".join(f"<td{_class(c)}>{cell}</td>" for c, cell in zip(part.columns, cells, strict=True))
        rows.append(f"<tr{kind}>{columns}</tr>")
    return "\n".join(
        [
            '<div class="scroll">',
            "<table>",
            f"<thead><tr>{''.join(head)}</tr></thead>",
            "<tbody>",
            *rows,
            "</tbody>",
            "</table>",
            "</div>",
        ]
    )


def _class(column: Column) -> str:
    return f' class="{column.kind.value}"'


def _title(column: Column) -> str:
    return "<br>".join(escape(line) for line in column.title.split("\n"))
