"""The options of a search. Each is declared once: its parsing, its field in the request, and its formatting.

The commands that take these options, the arguments of `autotune.tune`, the request built from them, the conflicts with
``--replay`` and the command line shown in a report are all derived from `OPTIONS`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from autotune.errors import UsageError
from autotune.knobs import KNOBS
from autotune.knobs.gradient_accumulation import KNOB as ACCUMULATION
from autotune.layout import DEFAULT_STUDIES
from autotune.records import LARGEST_IMAGE, StudySpec
from autotune.requirements import Requirements
from autotune.samplers import SAMPLERS
from autotune.study.search_option import (
    BANDWIDTH,
    DURATION,
    FILE,
    FILES,
    FLAG,
    FOLDER,
    LISTS,
    PAIRS,
    PATH,
    PRICE,
    SHORT,
    SIZE,
    STORAGE,
    TEXT,
    TEXTS,
    WHOLE,
    SearchOption,
)

#: In the order of the help text.
OPTIONS = (
    SearchOption(
        "model", FILE, "A name, FILE.py, or package.module:NAME.", "model", None, "MODEL", space=True, recorded=True
    ),
    SearchOption(
        "arg",
        PAIRS,
        "For the workload itself; may be repeated.",
        "args",
        None,
        "KEY=VALUE",
        space=True,
        recorded=True,
        keyword="args",
    ),
    SearchOption(
        "data", FOLDER, "A folder, generated, or synthetic.", "data", "generated", "DATA", space=True, recorded=True
    ),
    SearchOption(
        "store_latency",
        SHORT,
        "Put a slow store in front of the data: how long each file takes to come, such as 80ms.",
        "store_latency_s",
        metavar="DURATION",
        recorded=True,
    ),
    SearchOption(
        "store_bandwidth",
        BANDWIDTH,
        "Its bandwidth for one reader, such as 50MB/s.",
        "store_bytes_per_s",
        metavar="SIZE/s",
        recorded=True,
    ),
    SearchOption(
        "store_cache",
        SIZE,
        "A cache in front of it, as it is after the first epoch.",
        "store_cache_bytes",
        metavar="SIZE",
        recorded=True,
    ),
    SearchOption(
        "epochs",
        WHOLE,
        "Epochs of the training: report the hours they take, and the first one's rate.",
        "epochs",
        minimum=1,
        maximum=10**6,
    ),
    SearchOption(
        "samples",
        WHOLE,
        "Samples that the training reads in all, where no whole number of epochs says it.",
        "samples",
        minimum=1,
    ),
    SearchOption(
        "price_per_hour",
        PRICE,
        "What this machine costs, in whatever currency: report what the training costs.",
        "price_per_hour",
        metavar="PRICE",
    ),
    # Left out of the written command: once the search has begun, the name is taken.
    SearchOption(
        "study", TEXT, "Name of the study.  [default: a fresh number]", "name", "", recorded=True, written="never"
    ),
    SearchOption(
        "storage",
        STORAGE,
        "Store it in a database that several machines share: postgresql://USER@HOST/DATABASE.",
        "storage",
        metavar="URL",
        recorded=True,
        keyword=None,
    ),
    SearchOption("studies_dir", PATH, "Folder that holds the studies.", default=DEFAULT_STUDIES, recorded=True),
    SearchOption("budget", DURATION, "How long to search.", "budget_s", "10m", "DURATION", written="always"),
    SearchOption("trials", WHOLE, "End after this many trials.", "trials", minimum=1),
    SearchOption(
        "objective",
        FILES,
        "A name or FILE.py; higher is better. Several with commas: the first chooses the winner.",
        "objective",
        "throughput",
    ),
    SearchOption(
        "require",
        TEXTS,
        "What the winner must meet, such as 'peak_memory<=8GiB'; may be repeated.",
        "require",
        None,
        "FIGURE<=VALUE",
    ),
    SearchOption(
        "device",
        TEXT,
        "auto, cpu, cuda, cuda:N, cuda:GPU-UUID or cuda:MIG-UUID.",
        "device",
        "auto",
        "DEVICE",
        space=True,
        recorded=True,
    ),
    SearchOption(
        "devices",
        TEXT,
        "Search on several at once: 0,1,2,3 or all for cards, cpu:0-7,cpu:8-15 for cores.",
        "devices",
        metavar="LIST",
        recorded=True,
    ),
    SearchOption(
        "on",
        TEXT,
        "Launch on the nodes of a Ray cluster: ray://HOST:10001, or ray for the one that this machine is in.",
        "on",
        metavar="CLUSTER",
        recorded=True,
        keyword=None,
    ),
    SearchOption(
        "on_resources",
        PAIRS,
        "What each worker there asks for: accelerator_type=H100, CPU=8, or resources of your own. May be repeated.",
        "on_resources",
        None,
        "NAME=AMOUNT",
        recorded=True,
        keyword=None,
    ),
    SearchOption(
        "workers",
        WHOLE,
        "With --on: how many there, instead of all. With --storage: how many devices at once, of `autotune work` too.",
        "workers",
        metavar="N",
        minimum=1,
        maximum=2**10,
        recorded=True,
        keyword=None,
    ),
    SearchOption(
        "batch_size",
        WHOLE,
        "The baseline's batch size.",
        "batch_size",
        minimum=1,
        maximum=KNOBS["batch_size"].maximum,
        space=True,
        recorded=True,
    ),
    SearchOption(
        "keep_batch_size",
        FLAG,
        "Search at the baseline's batch size only.",
        "keep_batch_size",
        False,
        space=True,
    ),
    SearchOption(
        "global_batch",
        WHOLE,
        "Samples of an optimizer's step: fixed, in parts that are searched.",
        "global_batch",
        minimum=1,
        maximum=KNOBS["batch_size"].maximum,
        space=True,
        recorded=True,
    ),
    SearchOption(
        "nproc_per_node",
        WHOLE,
        "Processes that train together, as torchrun starts them; the batch size is each one's.",
        "ranks",
        1,
        minimum=1,
        maximum=2**10,
        space=True,
        recorded=True,
    ),
    SearchOption(
        "image_size",
        WHOLE,
        "Side of an image in pixels.",
        "image_size",
        minimum=1,
        maximum=LARGEST_IMAGE,
        space=True,
        recorded=True,
    ),
    SearchOption(
        "samples_per_step",
        WHOLE,
        "Of a script's optimizer, where its loader does not tell.",
        "samples_per_step",
        minimum=1,
        space=True,
        recorded=True,
        keyword=None,
    ),
    SearchOption(
        "map",
        PAIRS,
        "Words by which a script's own options set a knob; may be repeated.",
        "flags",
        None,
        "KNOB[:VALUE]=WORDS",
        space=True,
        recorded=True,
        keyword=None,
    ),
    SearchOption(
        "output_flag",
        TEXT,
        "A script's option for where it writes: each launch gets a folder, removed at its end.",
        "output_flag",
        metavar="FLAG",
        space=True,
        recorded=True,
        keyword=None,
    ),
    SearchOption(
        "scratch",
        FLAG,
        "Run each launch of a script in an empty folder of its own, removed at its end.",
        "scratch",
        False,
        space=True,
        recorded=True,
        keyword=None,
    ),
    SearchOption(
        "rate",
        TEXT,
        "How a program that is not PyTorch's tells (?P<rate>…), samples/s, or (?P<seconds>…) of a step.",
        "rate",
        metavar="REGEX",
        space=True,
        recorded=True,
        keyword=None,
    ),
    SearchOption(
        "rate_file",
        TEXT,
        "The file in which it does, if not on its output.",
        "rate_file",
        metavar="FILE",
        space=True,
        recorded=True,
        keyword=None,
    ),
    SearchOption(
        "script",
        PATH,
        "A file of `autotune init -- python train.py`: the command and its own flags.",
        metavar="FILE",
        space=True,
        recorded=True,
        keyword=None,
    ),
    SearchOption("baseline", PAIRS, "What is run today.", "baseline", None, "KNOB=VALUE", space=True, recorded=True),
    SearchOption("set", LISTS, "Search only these values of a knob.", "narrowed", None, "KNOB=V1,V2", space=True),
    SearchOption("fix", PAIRS, "Pin a knob.", "fixed", None, "KNOB=VALUE", space=True),
    SearchOption(
        "memory_limit",
        SIZE,
        "Device memory a trial may use.",
        "memory_limit_bytes",
        None,
        "6GiB",
        space=True,
        recorded=True,
    ),
    SearchOption("sampler", TEXT, f"{', '.join(SAMPLERS)}.", "sampler", "auto"),
    SearchOption("seed", WHOLE, "Of everything random.", "seed", 0, minimum=0),
    SearchOption("allow_busy", FLAG, "Measure although others use cores or GPU.", "allow_busy", False, recorded=True),
    SearchOption(
        "dry_run", FLAG, "Say what would be tried; measure nothing.", default=False, recorded=True, keyword=None
    ),
    SearchOption("replay", PATH, "Search a recorded surface in virtual time.", metavar="SURFACE", keyword=None),
)


def option(name: str) -> SearchOption:
    """Return the option called ``name``."""
    return {found.name: found for found in OPTIONS}[name]


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
    # Raises for what is none.
    spec = spec.model_copy(update={"require": tuple(map(str, Requirements.parsed(spec.require, spec.goal).every))})
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
    return spec


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
