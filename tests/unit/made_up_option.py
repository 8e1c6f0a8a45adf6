"""Run by `test_options`: declares an option of a search, and prints how the commands handle it.

Prints lines of JSON with the result and the message of each command line.
"""

import contextlib
import io
import json
from typing import Any

import autotune.base.records
from autotune.base.records import study


class WiderSpec(study.StudySpec):
    biscuits: str = "none"


autotune.base.records.StudySpec = study.StudySpec = WiderSpec

from autotune.study import request  # noqa: E402
from autotune.study.request import TEXT  # noqa: E402

MADE_UP = request.SearchOption("biscuits", TEXT, "Beside the tea.", "none", space=True, recorded=True)
request.OPTIONS = (*request.OPTIONS, MADE_UP)

from autotune.base.errors import UsageError  # noqa: E402
from autotune.cli import search, space, submit  # noqa: E402
from autotune.cli.main import run  # noqa: E402
from autotune.study.request import command_of  # noqa: E402

asked: list[WiderSpec] = []


def keep(spec: WiderSpec, *_: Any) -> None:
    asked.append(spec)
    raise UsageError("that is enough")


class Daemon:
    """Accepts jobs and ignores them."""

    def status(self) -> dict[str, Any]:
        return {"state": "running"}

    def submit(self, *requests: Any) -> list[Any]:
        asked.extend(request.spec for request in requests)
        return []


search.search_study = space.make_space = keep
submit.client = lambda _: Daemon()
for command in ("search", "space", "submit"):
    for more in (["--biscuits", "two"], []):
        run([command, "--model", "resnet18", *more])
        print(json.dumps({"command": command, "more": more, "written": command_of(asked.pop())}))
with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(said):
    run(["search", "--help"])
    run(["space", "--help"])
    run(["search", "--replay", "surface.jsonl", "--biscuits", "two"])
print(json.dumps(said.getvalue()))
