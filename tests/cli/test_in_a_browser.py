"""The report and the daemon's page in a real browser: nothing is fetched, complained of or on top of something."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.base.records import Done, Job
from autotune.daemon.web import Progress, one_job
from autotune.report import to_html
from tests.support import make_job_request, make_trial

from .conftest import Finished

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
DEADLINE_S = 120.0
#: Looks for what sticks out of the window or of its picture, and for texts of a picture on top of each other.
LOOK = """
const seen = [];
if (document.documentElement.scrollWidth > innerWidth) seen.push("wider than the window");
const most = (r, s, a, b) => Math.min(r[b], s[b]) - Math.max(r[a], s[a]);
for (const svg of document.querySelectorAll("svg.plot")) {
  const box = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
  texts.forEach(([text, r], i) => {
    if (r.left < box.left - 1 || r.right > box.right + 1 || r.bottom > box.bottom + 1) seen.push("outside: " + text);
    for (const [other, s] of texts.slice(i + 1))
      if (most(r, s, "left", "right") > 1 && most(r, s, "top", "bottom") > 2) seen.push(text + " | " + other);
  });
}
document.title = JSON.stringify([document.querySelectorAll("svg.plot").length, seen]);
"""


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[str, int], tuple[int, list[str], list[str], list[str]]]:
    """Return a function that opens a page in a window of some width.

    It returns the number of its pictures, what was seen to overlap, console messages, and addresses it has asked for.
    """

    def look(page: str, width: int) -> tuple[int, list[str], list[str], list[str]]:
        file, log = tmp_path / "page.html", tmp_path / "net.json"
        assert BROWSER is not None
        file.write_text(page.replace("</body>", f"<script>{LOOK}</script></body>"))
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--log-net-log={log}")
        places = (f"--user-data-dir={tmp_path / 'browser'}", f"--window-size={width},900")
        done = subprocess.run(
            [BROWSER, *options, *places, "--dump-dom", file.as_uri()],
            capture_output=True,
            text=True,
            check=True,
            timeout=DEADLINE_S,
        )
        found = re.search(r"<title>(.*?)</title>", done.stdout)
        assert found is not None, done.stderr
        pictures, overlaps = json.loads(found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
        console = [line for line in done.stderr.splitlines() if ":CONSOLE:" in line]
        events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
        # The browser's own requests come from no page.
        mine = [e["url"] for e in events if "url" in e and e.get("initiator", "not an origin") != "not an origin"]
        return pictures, overlaps, console, mine

    return look


@pytest.mark.parametrize("width", [390, 1200])
def test_the_report(
    finished: Finished, opened: Callable[[str, int], tuple[int, list[str], list[str], list[str]]], width: int
) -> None:
    page = finished.project.typed("report", "my_tiny_net-1", "--format", "html").stdout
    pictures, overlaps, console, asked = opened(page, width)
    assert pictures >= 3
    assert (overlaps, console, asked) == ([], [], [])
    assert len(page) < 500_000


def test_the_daemon_s_page_of_a_job(opened: Callable[[str, int], tuple[int, list[str], list[str], list[str]]]) -> None:
    progress = Progress()
    progress.trial_ends(make_trial(0, {"batch_size": 32}))
    job = Job(id=1, submitted="", request=make_job_request(), status=Done(ended=""))
    links = (("overview", "/"), ("the report, with pictures", "/jobs/1/report"))
    page = to_html(one_job(job, None, progress, links, "2.02× faster (1.83–2.24): 51.9 instead of 25.7 samples/s."))
    assert "<strong>2.02× faster" in page and 'href="/jobs/1/report"' in page
    _, overlaps, console, asked = opened(page, 390)
    assert (overlaps, console, asked) == ([], [], [])


def test_what_a_page_asks_for_and_complains_of_would_be_seen(
    opened: Callable[[str, int], tuple[int, list[str], list[str], list[str]]],
) -> None:
    parts = ("<script>nope()</script>", '<img src="http://example.invalid/x.png">', '<p style="width: 9999px">x')
    page = f"<!doctype html><title>x</title><body>{''.join(parts)}</body>"
    _, overlaps, console, asked = opened(page, 390)
    assert overlaps == ["wider than the window"] and "nope is not defined" in console[0]
    assert "http://example.invalid/x.png" in asked
