"""Draws the pictures of the terminal and of the report in README and docs/, from a finished study.

python -m benchmarks.screens STUDY_FOLDER docs [--epochs 90]

Writes `terminal.svg` (what `autotune report` prints) and `report.png` (the first screen of its page; needs Chromium).
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

from autotune.report import read_material, report_on, short_report_on, to_html, to_terminal
from autotune.search import find_study, load_outcome

#: Columns of the terminal, and the window of the browser in pixels.
COLUMNS, WINDOW = 98, (1200, 1104)
COLOURS = 64
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
#: Rich's own template fetches its font from the network.
SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px;
  line-height: {line_height}px; }}
.{unique_id}-title {{ font-family: sans-serif; font-size: 18px; font-weight: bold; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def photographed(page: str, picture: Path) -> None:
    """Write a picture of the upper part of an HTML page."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit("there is no Chromium: install it (Debian: apt install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.html")
        file.write_text(page)
        size = f"--window-size={WINDOW[0]},{WINDOW[1]}"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", size]
        places = [f"--user-data-dir={folder}/browser", f"--screenshot={picture}", file.as_uri()]
        subprocess.run([browser, *options, *places], check=True, capture_output=True, timeout=120)
    Image.open(picture).quantize(COLOURS).save(picture, optimize=True)


def main() -> None:
    """Draw both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("study", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int)
    options = parser.parse_args()
    files = find_study(str(options.study), options.study.parent)
    done = load_outcome(files)
    if done is None:
        raise SystemExit(f"{options.study} is not finished: autotune resume goes on with it")
    # As if the search had been run in the current folder.
    outcome = done.model_copy(update={"folder": f"studies/{options.study.name}"})
    found = read_material(files, outcome, typed=options.study.name, folder=Path.cwd())
    material = replace(found, spec=found.spec.model_copy(update={"epochs": options.epochs or found.spec.epochs}))
    console = Console(file=io.StringIO(), width=COLUMNS, record=True, force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ autotune report {options.study.name}", style="bold green"))
    console.print(to_terminal(short_report_on(material, width=COLUMNS)), "")
    svg = console.export_svg(title="autotune", code_format=SVG, unique_id="terminal")
    (options.folder / "terminal.svg").write_text(svg)
    photographed(to_html(report_on(material)), (options.folder / "report.png").resolve())


if __name__ == "__main__":
    main()
