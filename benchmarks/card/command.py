"""Plans the parts into the minutes given, and runs each in a process of its own.

    python -m benchmarks.card [--part NAME]… [--minutes 9] [--out DIR] [--rehearse]
    python -m benchmarks.card --list
    python -m benchmarks.card --wheels

Without --part it runs what has no good result yet on this machine with this code, the most informative first, so that
the same command continues where the last call ended. Run nothing else meanwhile. See `benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.card.parts import BY_NAME, PARTS, Part, in_order, next_part, planned
from benchmarks.card.results import Result, append, last_of_each, page, read

ROOT = Path(__file__).resolve().parent.parent.parent
#: What is measured. Results may change meanwhile.
_CODE = ("autotune", "models", "objectives", "benchmarks/card", "benchmarks/workloads")
RESULTS = ROOT / "benchmarks" / "results"
#: Seconds that a part needs to end by itself when its time is over, that the command needs after it, and that the
#: part's process needs before it counts its own.
TO_END_S = 20.0
RESERVE_S = 5.0
START_S = 2.0


@dataclass(frozen=True)
class Call:
    """One call of the command.

    Attributes:
        file: the results. machine: one line on the machine. uuid: of the card; ``None`` in a rehearsal.
        work: folder for what parts leave for later ones, and for a copy of all results on this machine.
    """

    file: Path
    work: Path
    machine: str
    commit: str
    uuid: str | None
    rehearsal: bool

    @property
    def copy(self) -> Path:
        """All results on this machine, for calls whose folder of results is another one or has been emptied."""
        return self.work / self.file.name

    def results(self) -> list[Result]:
        """Return the results so far, in the order of their times."""
        found = {
            json.dumps(asdict(result), default=str): result for file in (self.copy, self.file) for result in read(file)
        }
        return sorted(found.values(), key=lambda result: result.time)

    def append(self, result: Result) -> None:
        """Append a result, and write the page anew."""
        for file in {self.file, self.copy}:
            append(file, result)
        title = f"On a card: {self.file.stem.removeprefix('card-')}"
        self.file.with_suffix(".md").write_text(page(self.results(), title))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = _parser().parse_args(arguments)
    if options.list:
        print(listing(options.rehearse))
        return
    if options.wheels:
        from benchmarks.card.wheels import told, wheels

        print(told(wheels()))
        return
    began = time.monotonic()
    # So that it runs from a plain checkout: the launches' processes do not look into the current folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    call = _call(options)
    before = last_of_each([result for result in call.results() if result.commit == call.commit])
    todo = in_order(options.part, lambda name: before[name].status if name in before else None)
    failed = run_all(call, todo, began + 60 * options.minutes, _say(), run_part)
    raise SystemExit(1 if failed else 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.card", description=__doc__.split("\n\n")[0])
    parser.add_argument("--part", action="append", default=[], choices=list(BY_NAME), help="may be repeated")
    parser.add_argument("--minutes", type=float, default=9.0, help="for this call  [default: 9]")
    parser.add_argument("--out", type=Path, help="folder of the results  [default: benchmarks/results]")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small sizes: figures mean nothing")
    parser.add_argument("--list", action="store_true", help="list the parts")
    parser.add_argument("--wheels", action="store_true", help="list the wheels that a bare machine needs")
    parser.add_argument("--commit", help="of the code, for a copy without .git")
    return parser


def listing(rehearsal: bool) -> str:
    """Return the parts with their estimates, one a line."""
    rows = [(p.name, "what is left" if p.elastic else f"{p.seconds(rehearsal):.0f} s", p.about) for p in PARTS]
    return "\n".join(f"{name:18}{takes:>14}  {about}" for name, takes, about in rows)


def _call(options: argparse.Namespace) -> Call:
    try:
        from autotune.base.errors import AutotuneError
        from autotune.machine.host import read_host
        from autotune.search.request import resolve_device
        from benchmarks.tables import machine
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error.name} is missing here; --wheels, where it is not, lists what to bring") from error
    try:
        gpu = None if options.rehearse else resolve_device("auto").gpu
    except AutotuneError as error:
        raise SystemExit(f"{error}; {error.advice}") from error
    if gpu is None and not options.rehearse:
        raise SystemExit("there is no card here; --rehearse runs the parts on the CPU, with small sizes")
    name = f"rehearsal-cpu-{read_host().cores}-cores" if gpu is None else gpu.name
    stem = f"card-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"
    work = Path(tempfile.gettempdir(), f"autotune-{stem}-{os.getuid()}")
    work.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The figures of a rehearsal do not belong beside measured ones.
    out = options.out or (work if options.rehearse else RESULTS)
    return Call(
        file=out.absolute() / f"{stem}.jsonl",
        work=work,
        machine=machine(),
        commit=options.commit or commit(),
        uuid=None if gpu is None else gpu.uuid,
        rehearsal=options.rehearse,
    )


def commit() -> str:
    """Return the checkout's commit, with ``-dirty`` if code is changed; without ``.git``, a hash of the source."""
    with suppress(OSError, subprocess.CalledProcessError):
        changed = _git("status", "--porcelain", "--", *_CODE)
        return _git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    found = hashlib.sha256()
    for path in sorted((ROOT / "autotune").rglob("*.py")):
        found.update(path.read_bytes())
    return f"source-{found.hexdigest()[:12]}"


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _say() -> Callable[[str], None]:
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    return lambda text: console.print(text, markup=False)


def run_all(
    call: Call,
    todo: Sequence[Part],
    ends: float,
    say: Callable[[str], None],
    run: Callable[[Call, Part, float], Result],
) -> int:
    """Run the parts that fit until ``ends`` (`time.monotonic`), each appended when it ends; return how many failed."""
    left = list(todo)
    plan = planned(left, ends - time.monotonic() - RESERVE_S - TO_END_S, call.rehearsal)
    say(f"{call.machine} Code: {call.commit}.")
    say(f"planned: {', '.join(p.name for p in plan) or 'nothing'}; {(ends - time.monotonic()) / 60:.1f} minutes")
    failed = 0
    while part := next_part(left, ends - time.monotonic() - RESERVE_S - TO_END_S, call.rehearsal):
        left.remove(part)
        say(f"{part.name}: {part.about} …")
        result = run(call, part, part.limit_s(ends - time.monotonic() - RESERVE_S, call.rehearsal))
        call.append(result)
        reason = f": {result.reason.strip().splitlines()[-1]}" if result.reason else ""
        say(f"{part.name}: {result.status} after {result.seconds:.1f} s{reason}")
        if result.status == "failed":
            failed += 1
            needy = [p for p in left if p.after == part.name]
            left = [p for p in left if p not in needy]
            if needy:
                say(f"left out, because they need {part.name}: {', '.join(p.name for p in needy)}")
    if left:
        say(f"left out, because no time is left: {', '.join(p.name for p in left)}")
    say(f"results: {call.file.name} and {call.file.stem}.md in {call.file.parent}")
    return failed


def run_part(call: Call, part: Part, limit_s: float) -> Result:
    """Run one part in a process of its own, for at most ``limit_s`` seconds."""
    end, figures = call.work / "end.json", call.work / "figures.json"
    for file in (end, figures):
        file.unlink(missing_ok=True)
    asked = {
        "part": part.name,
        "work": str(call.work),
        "out": str(call.file.parent),
        "stem": call.file.stem,
        "rehearsal": call.rehearsal,
        "left_s": limit_s - TO_END_S - START_S,
        "uuid": call.uuid,
    }
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.card.inside", json.dumps(asked)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
    try:
        code = process.wait(timeout=limit_s - TO_END_S)
    except subprocess.TimeoutExpired:
        code = _ended(process)
    except BaseException:
        _ended(process)
        raise
    told = _read(end) or {"status": "failed", "reason": f"the part's process ended with {code} and no report"}
    return Result(
        part=part.name,
        seconds=round(time.monotonic() - began, 1),
        figures=_read(figures) or {},
        machine=call.machine,
        commit=call.commit,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        rehearsal=call.rehearsal,
        **told,
    )


def _ended(process: subprocess.Popen[bytes]) -> int:
    """End a part's process and its children, first by asking; return the exit code."""
    for number, patience_s in ((signal.SIGTERM, TO_END_S - RESERVE_S), (signal.SIGKILL, RESERVE_S)):
        with suppress(ProcessLookupError):
            if number is signal.SIGTERM:
                process.send_signal(number)
            else:
                os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=patience_s)
    return -signal.SIGKILL


def _read(file: Path) -> Any:
    with suppress(OSError, ValueError):
        return json.loads(file.read_text())
    return None
