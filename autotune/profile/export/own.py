"""A format of the user's own: a function ``export(profile: dict) -> str`` that runs in a small process of its own.

The parent runs no user code: it hands the profile over as JSON, and takes the text back. The process is
``python -P -m autotune.profile.export.own SOURCE``, which writes ``{"text": …}`` or ``{"error": …}``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from autotune.base.errors import UsageError
from autotune.profile import Profile
from autotune.profile.export.format import NO_MAPS, Exported, Format, Maps
from autotune.workload.scoring import load

#: Writing a text takes a moment; a function that takes longer than this is stuck.
EXPORT_S = 20.0
_ADVICE = "a format is a function export(profile: dict) -> str."


class OwnFormat(Format):
    """A format of the user's own.

    Args:
        source: ``FILE.py``, whose function must be called ``export``, or ``package.module:NAME``, importable from the
            folder in which the command runs.

    Raises:
        UsageError: ``source`` is neither, or there is no such file.
    """

    about = "a format of your own"
    usage = ""

    def __init__(self, source: str) -> None:
        module, colon, function = source.partition(":")
        if source.endswith(".py"):
            if not Path(source).is_file():
                raise UsageError(f"there is no file {source}", advice=_ADVICE)
        elif not colon or not function.isidentifier() or not all(map(str.isidentifier, module.split("."))):
            raise UsageError(f"{source!r} is no format", advice="write it as FILE.py or package.module:NAME.")
        self.name = source

    def export(self, profile: Profile, maps: Maps = NO_MAPS) -> Exported:
        """Return what the function makes of the profile.

        Raises:
            UsageError: the function raised, returned something other than text, timed out, or ended its process.
        """
        # The child inherits stderr, so that its author sees what the function prints.
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "autotune.profile.export.own", self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        try:
            output, _ = child.communicate(profile.model_dump_json().encode(), EXPORT_S)
        except subprocess.TimeoutExpired:
            raise UsageError(f"format {self.name} gave no text within {EXPORT_S:.0f} s", advice=_ADVICE) from None
        finally:
            # Also kill whatever it has started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
        try:
            answer = json.loads(output.splitlines()[-1])
        except (ValueError, IndexError):
            answer = {"error": f"its process ended without an answer (exit code {child.returncode})"}
        if "error" in answer:
            raise UsageError(f"format {self.name}: {answer['error']}", advice=_ADVICE)
        return Exported(answer["text"])


def _main(source: str) -> None:
    """Write the answer as one line on stdout. Only in the process of its own: it runs the user's code."""
    # Redirect what the function prints to stderr, so that it does not mix with the answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        if source.endswith(".py"):
            export = load(Path(source).absolute()).export
        else:
            sys.path.insert(0, os.getcwd())
            module, _, name = source.partition(":")
            export = getattr(importlib.import_module(module), name)
        text = export(json.load(sys.stdin))
        if not isinstance(text, str):
            raise TypeError(f"it returned {type(text).__name__}, not text")
        text.encode()
        answer = {"text": text}
    except (Exception, SystemExit) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    _main(sys.argv[1])
