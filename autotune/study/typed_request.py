"""A request as it is typed: built from the values of options, and written as a command line again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from autotune.base.errors import UsageError
from autotune.knobs.gradient_accumulation import KNOB as ACCUMULATION
from autotune.base.records import StudySpec
from autotune.space.requirements import Requirements
from autotune.study.options import OPTIONS


def spec_of(parsed: Mapping[str, Any], *, mark: str, created: str) -> StudySpec:
    """Build a request from parsed values by option name; missing ones get their defaults.

    Raises:
        UsageError: a value is invalid, or two options contradict each other.
    """
    asked = {o.field: o.value(parsed[o.name]) for o in OPTIONS if o.field is not None and o.name in parsed}
    try:
        spec = StudySpec.model_validate({"name": "", "mark": mark, "created": created, **asked})
    except ValidationError as error:
        raise _refused(error) from None
    _refuse_contradictions(spec)
    # Raises for what is none.
    return spec.model_copy(update={"require": tuple(map(str, Requirements.parsed(spec.require, spec.goal).every))})


def _refuse_contradictions(spec: StudySpec) -> None:
    if spec.devices is not None and spec.device != "auto":
        raise UsageError("--device and --devices both say where to search", advice="leave one of them out.")
    if spec.devices is not None and spec.ranks > 1:
        raise UsageError(
            "--devices searches for a training on one device, and --nproc-per-node for one on several",
            advice="leave one of them out.",
        )
    if spec.workers is not None and (spec.devices is not None or spec.ranks > 1):
        raise UsageError(
            "with --workers, each machine has one device", advice="leave --devices and --nproc-per-node out."
        )
    if spec.epochs is not None and spec.samples is not None:
        raise UsageError("--epochs and --samples both say how long the training is", advice="leave one of them out.")
    stated = spec.baseline.get("batch_size")
    if spec.batch_size is not None and stated is not None and stated != str(spec.batch_size):
        raise UsageError(f"--batch-size {spec.batch_size} and --baseline batch_size={stated} contradict each other")
    if spec.keep_batch_size and "batch_size" in {*spec.narrowed, *spec.fixed}:
        raise UsageError("--keep-batch-size and a --set or --fix of batch_size contradict each other")
    if spec.global_batch is not None:
        _check_global_batch(spec, spec.global_batch)
    both = sorted(spec.narrowed.keys() & spec.fixed.keys())
    if both:
        raise UsageError(f"{both[0]} is given both to --set and to --fix")


def _check_global_batch(spec: StudySpec, samples: int) -> None:
    for flag, given in (("--set", spec.narrowed), ("--fix", spec.fixed), ("--baseline", spec.baseline)):
        if "batch_size" in given:
            raise UsageError(f"--global-batch fixes the batch size, and {flag} says something else of it")
    if samples % spec.ranks:
        raise UsageError(f"--global-batch {samples} cannot be divided equally among {spec.ranks} ranks")
    if spec.batch_size is not None and samples % (spec.batch_size * spec.ranks):
        of_all = f" times {spec.ranks} ranks" if spec.ranks > 1 else ""
        raise UsageError(
            f"--global-batch {samples} is not a multiple of --batch-size {spec.batch_size}{of_all}",
            advice="--batch-size says how many samples go through the model at once today.",
        )
    if spec.batch_size is not None and ACCUMULATION.name in spec.baseline:
        raise UsageError(
            f"--batch-size and --baseline {ACCUMULATION.name} both say what is run today", advice="leave one out."
        )


def _refused(error: ValidationError) -> UsageError:
    first = error.errors()[0]
    flag = next((o.flag for o in OPTIONS if first["loc"] and o.field == first["loc"][0]), str(first["loc"]))
    return UsageError(f"{flag} cannot be {first['input']!r}: {first['msg'][:1].lower()}{first['msg'][1:]}")


def command_of(spec: StudySpec) -> str:
    """Return the command line that makes the same request, without options at their defaults."""
    asked = [o for o in OPTIONS if o.field is not None and (spec.command is None or o.field != "model")]
    words = [w for o in asked for w in o.words(getattr(spec, str(o.field)))]
    script = () if spec.command is None else ("--", *spec.command.words)
    return shlex.join(["autotune", "search", *words, *script])
