"""The documentation as a site: built without a warning; in a browser, it asks for nothing and overflows nowhere."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import autotune

ROOT = Path(autotune.__file__).parents[1]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
DEADLINE_S = 240
#: Opens every page in a frame, at the width of a telephone and of a desk, and searches the first one for a word.
FRAMES = """<!doctype html><title>?</title><body>{frames}<script>
onload = async () => {{
  const frames = [...document.querySelectorAll("iframe")];
  const wide = frames.filter(f => f.contentDocument.documentElement.scrollWidth > f.clientWidth);
  const page = frames[0].contentDocument;
  const query = page.querySelector("[data-md-component=search-query]");
  query.focus();
  query.value = "shm_exhausted";
  query.dispatchEvent(new Event("keyup", {{bubbles: true}}));
  let found = [];
  for (let i = 0; i < 300 && !found.length; i++) {{
    await new Promise(soon => setTimeout(soon, 100));
    query.dispatchEvent(new Event("keyup", {{bubbles: true}}));
    found = [...page.querySelectorAll(".md-search-result__link")].map(a => a.href.split("/").pop().split("?")[0]);
  }}
  const overflows = wide.map(f => f.src + " at " + f.clientWidth);
  document.title = JSON.stringify({{frames: frames.length, overflows, found}});
}};
</script></body>"""


@pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="needs mkdocs-material (pip install '.[docs]')"
)
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.timeout(DEADLINE_S + 60)
def test_the_site(tmp_path: Path) -> None:
    site = tmp_path / "site"
    build = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    pages = [path for path in sorted(site.rglob("*.html")) if path.relative_to(site).parts[0] != "source"]
    pages.sort(key=lambda page: page.name != "index.html")
    assert len(pages) > 25
    frames = [
        f'<iframe src="{page.as_uri()}" width="{width}" height="800"></iframe>'
        for page in pages
        for width in (390, 1200)
    ]
    harness, log = tmp_path / "frames.html", tmp_path / "net.json"
    harness.write_text(FRAMES.format(frames="".join(frames)))
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--log-net-log={log}")
    places = (
        f"--user-data-dir={tmp_path / 'browser'}",
        "--allow-file-access-from-files",
        "--virtual-time-budget=60000",
    )
    assert BROWSER is not None
    looked = subprocess.run(
        [BROWSER, *options, *places, "--dump-dom", harness.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    found = re.search(r"<title>(.*?)</title>", looked.stdout)
    assert found is not None, looked.stderr
    seen = json.loads(found[1])
    assert seen["frames"] == len(frames) and seen["overflows"] == []
    assert "troubleshooting.html" in seen["found"]
    assert [line for line in looked.stderr.splitlines() if ":CONSOLE" in line] == []
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    # The browser's own requests come from no page.
    asked = [e["url"] for e in events if "url" in e and e.get("initiator", "not an origin") != "not an origin"]
    assert asked == []
