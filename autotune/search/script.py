"""A training script of the user's in place of a workload: checks of what is asked of it, its file, and its name."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path, PurePath

from autotune.workload.catalog import source_hash
from autotune.launcher.entering import check_flags, flags_of, places, set_by
from autotune.base.errors import UsageError
from autotune.base.layout import StudyFiles
from autotune.base.records import CommandRef, Phase, StudySpec, WorkloadRef
from autotune.search.program import require_program
from autotune.study.launch_files import read_launch
from autotune.study.plans import plan_for

#: A script that takes this long until it trains is told how many launches fit, unless that is more than enough.
SLOW_START_S, ENOUGH = 15.0, 30
#: With as many, a search gets somewhere: a baseline, heats, a few trials, two finalists that are launched again.
_SOME = 12


def slow_start(files: StudyFiles, budget_s: float) -> str | None:
    """Say how many launches of a script fit into a budget; ``None`` if its probe began to train soon, or many do."""
    _, result = read_launch(files.launch("probe-1"))
    spent = {} if result is None else result.phase_s
    start_s = sum(spent.get(phase, 0.0) for phase in (Phase.LOAD, Phase.BUILD, Phase.COMPILE))
    fit = _launches_in(budget_s, start_s)
    if start_s < SLOW_START_S or fit >= ENOUGH:
        return None
    minutes = next(m for m in count(math.ceil(budget_s / 60)) if _launches_in(60.0 * m, start_s) >= _SOME)
    more = f"; --budget {minutes}m has room for {_SOME}" if fit < _SOME else ""
    return f"the script takes {start_s:.0f} s until it trains, so that about {fit} launches fit into the budget{more}"


def _launches_in(budget_s: float, start_s: float) -> int:
    # As long again as it is measured, it warms up.
    return int(budget_s / (start_s + 2 * plan_for(budget_s, None).max_measure_s))


def refuse_for_workload(spec: StudySpec) -> None:
    """Refuse options of scripts beside a workload.

    Raises:
        UsageError: there is one.
    """
    if spec.samples_per_step is not None:
        raise UsageError("--samples-per-step is for training scripts", advice="a workload's loader tells.")
    for flag, given in (
        ("--map", bool(spec.flags)),
        ("--output-flag", spec.output_flag is not None),
        ("--scratch", spec.scratch),
        ("--rate", spec.rate is not None),
        ("--rate-file", spec.rate_file is not None),
    ):
        if given:
            raise UsageError(f"{flag} is for training scripts", advice="a workload has no command.")


def checked_script(spec: StudySpec, command: CommandRef) -> WorkloadRef:
    """Check what is asked of a script before it is run, and return what stands for it in records.

    Raises:
        UsageError: an option is given that only workloads have, options contradict each other, or the script is not
            there.
    """
    for flag, given in (
        ("--data", spec.data != "generated"),
        ("--arg", bool(spec.args)),
        ("--image-size", spec.image_size is not None),
        ("--global-batch", spec.global_batch is not None),
        ("--nproc-per-node", spec.ranks > 1),
        ("--store-latency", spec.store_latency_s is not None),
        ("--store-bandwidth", spec.store_bytes_per_s is not None),
        ("--store-cache", spec.store_cache_bytes is not None),
    ):
        if given:
            raise UsageError(f"{flag} is for workloads", advice="a script has options of its own: put them behind --.")
    check_flags(command)
    if spec.samples_per_step is not None and any(flag.knob == "batch_size" for flag in flags_of(command.flags)):
        raise UsageError(
            "--samples-per-step says that a step has as many samples, whatever --map batch_size does",
            advice="leave one of them out.",
        )
    if "batch_size" in places(command.words) and spec.batch_size is None:
        raise UsageError("nothing says what {batch_size} is today", advice="--batch-size does.")
    _check_rate(spec, command)
    return command_ref(command, spec.model)


def _check_rate(spec: StudySpec, command: CommandRef) -> None:
    """Check what is said of a program that tells its own rate.

    Raises:
        UsageError: the expression is none, or lacks its group; or nothing could be set, or nothing says what is run
            today.
    """
    if command.rate is None:
        if command.rate_file is not None:
            raise UsageError("--rate-file says where, and nothing says what", advice="--rate REGEX does.")
        return
    try:
        groups = set(re.compile(command.rate).groupindex)
    except re.error as error:
        raise UsageError(f"--rate {command.rate!r} is no regular expression: {error}", advice="correct it.") from None
    if groups not in ({"rate"}, {"seconds"}):
        raise UsageError(
            f"--rate {command.rate!r} has not just one group called rate or seconds",
            advice="let (?P<rate>…) match samples per second, or (?P<seconds>…) the seconds of a step.",
        )
    if groups == {"rate"} and command.samples_per_step is not None:
        raise UsageError("--samples-per-step and a rate in samples contradict each other", advice="leave one out.")
    inside = set_by(command)
    if not inside:
        raise UsageError(
            "a program that tells its own rate is not looked into, and nothing says how to set a knob of it",
            advice="--map num_workers='--workers {num_workers}' does, or {num_workers} in its command.",
        )
    today = {*spec.baseline, *(["batch_size"] if spec.batch_size is not None else [])}
    for name in sorted(inside - today):
        raise UsageError(f"nothing says what {name} is today", advice=f"--baseline {name}=… does.")


def command_ref(command: CommandRef, name: str) -> WorkloadRef:
    """Return what a command trains, as a workload.

    Raises:
        UsageError: its program or its script does not exist, or the agent could not enter.
    """
    require_program(command)
    script = script_of(command)
    # Of a module or a program, the command itself is all that is known.
    digest = hashlib.sha256("\0".join(command.words).encode(errors="surrogateescape")).hexdigest()
    return WorkloadRef(name=name, module="", sha256=digest if script is None else source_hash(script))


def script_of(command: CommandRef) -> Path | None:
    """Return the file that a command runs, as far as its words tell: the first Python file among them."""
    named = (Path(command.folder) / word for word in command.words if word.endswith(".py"))
    return next((path for path in named if path.is_file()), None)


def command_name(words: Sequence[str]) -> str:
    """Return what a command is called: its script's or module's name, or else its program's."""
    script = next((PurePath(word).stem for word in words if word.endswith(".py")), None)
    module = next((after.rpartition(".")[2] for word, after in pairwise(words) if word == "-m"), None)
    found = script or module or PurePath(words[0]).name
    return re.sub(r"[^A-Za-z0-9._-]", "-", found).lstrip("-._") or "command"
