"""What all formats have in common."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from autotune.agent.site.autotune_agent.in_place import MALLOC_KEEPS
from autotune.base.errors import UsageError
from autotune.base.records import CommandRef, Config, Value
from autotune.knobs import KNOBS, Knob, Scope, spell
from autotune.knobs.alloc_conf import KNOB as ALLOCATOR
from autotune.knobs.alloc_conf import setting_of
from autotune.knobs.batch_memory import KNOB as BATCH_MEMORY
from autotune.knobs.compile_mode import KNOB as COMPILE
from autotune.knobs.compile_mode import replays
from autotune.knobs.cudnn_benchmark import KNOB as BENCHMARK
from autotune.knobs.deterministic import KNOB as DETERMINISTIC
from autotune.knobs.gradient_accumulation import KNOB as ACCUMULATION
from autotune.knobs.gradient_accumulation import parts_of
from autotune.knobs.gradient_compression import KNOB as COMPRESSION
from autotune.knobs.intra_op_threads import KNOB as THREADS
from autotune.knobs.malloc import KNOB as MALLOC
from autotune.knobs.memory_format import KNOB as FORMAT
from autotune.knobs.non_blocking import KNOB as NON_BLOCKING
from autotune.knobs.num_workers import KNOB as WORKERS
from autotune.knobs.optimizer_impl import KNOB as OPTIMIZER
from autotune.knobs.precision import KNOB as PRECISION
from autotune.launcher.script_entry import flags_of, words_of
from autotune.profile import Profile, learning_rate_line, printable
from autotune.space import samples_at_once
from autotune.space.formatting import rate_text, speedup_text

# Options as YAML, as JSON and as words, and how to recognise an earlier export that can have no comments.

#: Knobs that every configuration of a search has.
USUAL = ("batch_size", PRECISION.name, COMPILE.name, WORKERS.name)


def as_yaml(tree: Mapping[str, Any]) -> str:
    """Return plain data as YAML. Values are written as in JSON, which YAML 1.1 and 1.2 read alike."""
    return "".join(f"{line}\n" for line in _lines(tree, ""))


def _lines(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from _lines(value, f"{indent}  ")
        else:
            yield f"{indent}{name}: {json.dumps(value)}"


def as_json(tree: Mapping[str, Any]) -> str:
    """Return plain data as JSON, for people."""
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def as_words(words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return words on one line, as a shell reads them, with a note if some had to be quoted.

    ``$(…)`` splits its output at spaces, and takes quotes literally.
    """
    line = shlex.join(words)
    quoted = line != " ".join(words)
    note = 'Some words are quoted: run it as eval "python train.py $(…)", because $(…) alone takes quotes as they are.'
    return f"{line}\n", (note,) * quoted


def is_object_with(text: str, always: Set[str], sometimes: Set[str]) -> bool:
    """Return whether a text is a JSON object with all keys of ``always``, and no others but those of ``sometimes``."""
    try:
        data = json.loads(text)
    except ValueError:
        return False
    return isinstance(data, dict) and always <= data.keys() <= always | sometimes


def are_words_with(text: str, always: Set[str], known: Callable[[str], bool], *, equals: bool = False) -> bool:
    """Return whether a text is one line of options, with all names of ``always``, and no unknown ones.

    Args:
        equals: options are ``NAME=VALUE``. Otherwise they begin with a dash, and their values follow.
    """
    try:
        words = shlex.split(text)
    except ValueError:
        return False
    names = {w.partition("=")[0] for w in words} if equals else {w for w in words if w.startswith("-")}
    return text.count("\n") <= 1 and always <= names and all(map(known, names - always))


def heading(profile: Profile, start: str = "torchrun --nproc-per-node={ranks}") -> list[str]:
    """Return lines with study, trial, device and rate, and on the learning rate if the batch changed.

    Args:
        start: the command that starts the processes of a training with several ``{ranks}``.
    """
    figures, origin = profile.gives, profile.provenance
    device = f"{profile.conditions.device_name} ({profile.conditions.device})"
    speedup = speedup_text(figures.speedup, figures.speedup_ci95, figures.unproven)
    lines = [
        f"Study {origin.study}, trial {origin.trial}, of {origin.created}: {profile.workload.name} on {device},",
        f"{rate_text(figures.samples_per_second, figures.ci95)} {profile.unit} (95 %), {speedup}.",
    ]
    batch, before = profile.configuration["batch_size"], profile.baseline.configuration["batch_size"]
    if batch != before:
        lines += [f"Batch {batch} instead of {before}.", learning_rate_line(profile)]
    ranks = profile.conditions.ranks
    if ranks > 1:
        lines.append(
            f"{ranks} ranks, a process each, train together on batches of their own: {start.format(ranks=ranks)}."
        )
    return [printable(line) for line in lines]


# What a user does about a knob that a tool has no option for: one clause for each knob.

#: The allocator's environment variable, by its older and its newer name in PyTorch.
ALLOCATOR_VARIABLES = "PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"


def by_hand(name: str, value: Value, *, cuda: bool) -> str:
    """Return how to set a knob's value in one's own code or shell, as a clause."""
    knob = KNOBS.get(name)
    if knob is None:
        return "a knob of the workload, to be set in its code"
    if name in _CLAUSES:
        return _CLAUSES[name](value, cuda)
    options = knob.loader_options(value)
    if options or knob.scope is Scope.LOADER:
        return f"give it to the training's DataLoader: {', '.join(f'{n}={v!r}' for n, v in options.items())}"
    exchange = knob.exchange_options(value)
    if exchange:
        return f"give it to DistributedDataParallel: {', '.join(f'{n}={v!r}' for n, v in exchange.items())}"
    return "not known to this format; autotune.load_profile() applies it"


#: Its fused kernels corrupt the momentum in a step that overflows (see `set_implementation`).
SCALED_SGD = "SGD needs optimizer._step_supports_amp_scaling = False"


def _precision(value: Value, cuda: bool) -> str:
    if value == "tf32":
        return 'torch.set_float32_matmul_precision("high") before training'
    if value == "fp32":
        return "no autocast, and PyTorch's own switches for TF32"
    dtype = "bfloat16" if value == "bf16" else "float16"
    scaler = ", with a torch.amp.GradScaler" if value == "fp16" else ""
    return f'forward and loss under torch.autocast("{"cuda" if cuda else "cpu"}", dtype=torch.{dtype}){scaler}'


def _layout(value: Value, cuda: bool) -> str:
    if value == FORMAT.default:
        return "model and images stay as they are"
    return f"model.to(memory_format=torch.{value}), and the images of each batch alike"


def _implementation(value: Value, cuda: bool) -> str:
    arguments = {"fused": "fused=True", "foreach": "foreach=True"}.get(str(value), "foreach=False, fused=False")
    momentum = f"; with a GradScaler, {SCALED_SGD}" if value == "fused" and cuda else ""
    return f"give it to the training's optimizer: {arguments}{momentum}"


def _allocator(value: Value, cuda: bool) -> str:
    if value == ALLOCATOR.default:
        return f"no such setting in {ALLOCATOR_VARIABLES}"
    return f"{ALLOCATOR_VARIABLES} are to be {setting_of(value)} in the environment"


def _determinism(value: Value, cuda: bool) -> str:
    if not value:
        return "torch.use_deterministic_algorithms(False), as PyTorch has it"
    return "torch.use_deterministic_algorithms(True), and CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment"


def _accumulation(value: Value, cuda: bool) -> str:
    return "each batch in one piece" if value == 1 else f"each batch in {value} parts, with one step for all of them"


_CLAUSES: dict[str, Callable[[Value, bool], str]] = {
    PRECISION.name: _precision,
    COMPILE.name: lambda value, cuda: (
        "the model is not compiled" if value == COMPILE.default else f'model.compile(mode="{value}") before training'
    ),
    ACCUMULATION.name: _accumulation,
    FORMAT.name: _layout,
    NON_BLOCKING.name: lambda value, cuda: f"batches go to the device by tensor.to(device, non_blocking={bool(value)})",
    BENCHMARK.name: lambda value, cuda: f"torch.backends.cudnn.benchmark = {bool(value)} before training",
    DETERMINISTIC.name: _determinism,
    OPTIMIZER.name: _implementation,
    THREADS.name: lambda value, cuda: f"torch.set_num_threads({spell(value)}), or OMP_NUM_THREADS={spell(value)}",
    ALLOCATOR.name: _allocator,
    MALLOC.name: lambda value, cuda: (
        "no such setting in the environment"
        if value == MALLOC.default
        else f"start it with {' '.join(f'{n}={v}' for n, v in MALLOC_KEEPS.items())} in the environment"
    ),
    BATCH_MEMORY.name: lambda value, cuda: (
        "the loader's workers put batches where PyTorch does"
        if value == BATCH_MEMORY.default
        else "autotune run, autotune.load_profile() or the python format puts batches there"
    ),
    COMPRESSION.name: lambda value, cuda: (
        "no hook of DistributedDataParallel"
        if value == COMPRESSION.default
        else f"model.register_comm_hook(None, {value}_compress_hook), of torch.distributed.algorithms.ddp_comm_hooks"
    ),
}


# The contract of an export format, which every file in this catalog implements.

#: The start of the first line of every export that can have comments.
MARK = "autotune export"


@dataclass(frozen=True)
class Given:
    """What determines, besides a knob's value, how a tool expresses it.

    Attributes:
        cuda: whether the profile was measured on a CUDA device.
        model: name of the workload.
        start_method: how loader workers were started.
        ranks: number of processes that train together.
    """

    config: Config
    cuda: bool
    model: str = ""
    start_method: str = "fork"
    ranks: int = 1

    @property
    def batch_size(self) -> int:
        """Samples of an optimizer step."""
        return int(self.config["batch_size"])

    @property
    def parts(self) -> int:
        """Number of parts of a batch, whose gradients are accumulated."""
        return parts_of(self.config)

    @property
    def at_once(self) -> int:
        """Samples that go through the model at once, which most tools call the batch size.

        Raises:
            UsageError: the batch does not divide into its parts.
        """
        if self.batch_size % self.parts:
            raise UsageError(
                f"a batch of {self.batch_size} does not divide into {self.parts} equal parts",
                advice="the profile was altered; export the study again.",
            )
        return samples_at_once(self.config)


def given_by(profile: Profile) -> Given:
    """Return what a profile gives to a format."""
    cuda = profile.conditions.device.startswith("cuda")
    conditions = profile.conditions
    return Given(
        profile.configuration, cuda, profile.workload.name, conditions.worker_start_method, ranks=conditions.ranks
    )


@dataclass(frozen=True)
class Told:
    """How a tool expresses a knob's value.

    Attributes:
        options: options of the tool, with dots between sections and names. Empty if the tool does it by itself.
        lack: what to do by hand, as a clause, about what the tool has no option for.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    lack: str | None = None


#: Returns how a tool expresses a value. Raises `UsageError` if the tool would silently do something else with it.
Expression = Callable[[Value, Given], Told]
#: Words by ``KNOB`` or ``KNOB:VALUE``, as ``--map`` takes them.
Maps = Mapping[str, str]
NO_MAPS: Maps = MappingProxyType({})


def by_knob(**expressions: Expression) -> dict[str, Expression]:
    """Return how a tool expresses knobs, by their names, which must be those of knobs."""
    assert expressions.keys() <= KNOBS.keys(), expressions.keys() - KNOBS.keys()
    return expressions


def by_itself(lack: str) -> Expression:
    """Return how a knob is expressed that the tool has on by itself; ``lack``: what to do where it is off."""
    return lambda value, given: Told() if value else Told(lack=lack)


@dataclass(frozen=True)
class Exported:
    """An export: its text, and notes for stderr if the text can have no comments."""

    text: str
    notes: tuple[str, ...] = ()


class Format:
    """A format of `autotune export`.

    Each file of the catalog subclasses this or `ToolFormat`, and creates one instance called ``FORMAT``. The file's
    docstring becomes its section in ``docs/exports.md``. This class itself carries every knob's value as it is.

    Attributes:
        name: the name in ``--format``, and of the file.
        about: what it is for, in a few words.
        usage: how to use it, in one line; ``FILE`` stands for the exported file.
        place: position in lists, ascending.
        endings: file endings that only this format has.
        takes_maps: whether ``--map`` gives the words by which it sets knobs.
        flat: whether it can have no comments, because a shell or a tool reads it whole. They become notes.
    """

    name: str
    about: str
    usage: str
    place: int = 1000
    endings: tuple[str, ...] = ()
    takes_maps: bool = False
    flat: bool = False

    def told(self, name: str, value: Value, given: Given) -> Told:
        """Return how a knob's value is expressed.

        Raises:
            UsageError: the tool would silently do something else.
        """
        return Told()

    def export(self, profile: Profile, maps: Maps = NO_MAPS) -> Exported:
        """Return a profile in this format.

        Raises:
            UsageError: the result would be wrong.
        """
        raise NotImplementedError

    def is_earlier(self, text: str) -> bool:
        """Return whether a text is an earlier export in this format, which may be overwritten."""
        return text.startswith(f"# {MARK}: {self.name},")


class ToolFormat(Format):
    """A format with the options of a tool.

    Attributes:
        knobs: the knobs that the tool can express. The export lists all others, including any that are added later.
        start: the command that starts the processes of a training with several ``{ranks}`` with the tool.
    """

    knobs: Mapping[str, Expression]
    start: str = "torchrun --nproc-per-node={ranks}"

    def caution(self, given: Given) -> str:
        """Return what its users must know in any case, one sentence per line."""
        return ""

    def always(self, given: Given) -> dict[str, Any]:
        """Return options that depend on no knob, or that stand for knobs that the configuration does not have."""
        return {}

    def render(self, options: Mapping[str, Any], given: Given) -> str:
        """Return the text for options, whose names have dots between sections and names: YAML, or JSON if the format
        can have no comments."""
        return as_json(_nested(options)) if self.flat else as_yaml(_nested(options))

    def told(self, name: str, value: Value, given: Given) -> Told:
        express = self.knobs.get(name)
        return Told(lack=by_hand(name, value, cuda=given.cuda)) if express is None else express(value, given)

    def export(self, profile: Profile, maps: Maps = NO_MAPS) -> Exported:
        given = given_by(profile)
        options, lacks = self.always(given), []
        for name, value in given.config.items():
            expressed = self.told(name, value, given)
            options |= expressed.options
            if expressed.lack is not None:
                lacks.append(f"{printable(f'{name}={spell(value)}')}: {printable(expressed.lack)}")
        notes = [*heading(profile, self.start), *self.caution(given).splitlines()]
        notes += ["Not expressed here:", *(f"  {lack}" for lack in lacks)] if lacks else ["All knobs are expressed."]
        body = self.render(options, given)
        if self.flat:
            return Exported(body, tuple(notes))
        lines = [f"{MARK}: {self.name}, for {self.about}", *notes, f"Use it: {self.usage}"]
        return Exported("".join(f"# {line}".rstrip() + "\n" for line in lines) + body)


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with dots in their names as nested sections."""
    root: dict[str, Any] = {}
    for name, value in options.items():
        *sections, last = name.split(".")
        place = root
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return root


class WordsFormat(Format):
    """A format of words on one line: those of ``--map``, or else a word for each knob.

    Attributes:
        as_searched: without ``--map``, the one that the search was given is in force.
    """

    takes_maps = True
    flat = True
    as_searched = False

    def words(self, profile: Profile) -> list[str]:
        """Return the words for a profile without ``--map``."""
        raise NotImplementedError

    def export(self, profile: Profile, maps: Maps = NO_MAPS) -> Exported:
        flags = maps or (profile.workload.flags if self.as_searched else {})
        words, missing = _mapped(profile, flags) if flags else (self.words(profile), [])
        line, notes = as_words(words)
        return Exported(line, (*heading(profile), *missing, *notes))


def _mapped(profile: Profile, flags: Maps) -> tuple[list[str], list[str]]:
    """Return the words that set a profile's knobs, and a line for each knob that has none.

    Raises:
        UsageError: see `flags_of`.
    """
    config, defaults = profile.configuration, profile.workload.own
    command = CommandRef(words=("script",), folder=".", flags=dict(flags), own=defaults)
    flagged = {(flag.knob, None if flag.value is None else spell(flag.value)) for flag in flags_of(flags)}
    cuda = given_by(profile).cuda
    missing = [
        printable(f"{name}={spell(value)} has no words: {by_hand(name, value, cuda=cuda)}")
        for name, value in config.items()
        if not {(name, None), (name, spell(value))} & flagged and defaults.get(name) != value
    ]
    return words_of(command, config)[1:], missing


def of_loader(prefix: str) -> dict[str, Expression]:
    """Return how the loader's knobs are expressed by a DataLoader's own arguments, whose names get a prefix."""

    def of(knob: Knob) -> Expression:
        def told(value: Value, given: Given) -> Told:
            context = {"multiprocessing_context": given.start_method} if knob is WORKERS and value else {}
            return Told({f"{prefix}{name}": v for name, v in {**knob.loader_options(value), **context}.items()})

        return told

    return {
        name: of(knob)
        for name, knob in KNOBS.items()
        if knob.scope is Scope.LOADER and type(knob).loader_options is not Knob.loader_options
    }


# How a tool's own loop is told to compile, which goes wrong with some uses of CUDA graphs.


def compiling(mode: str, *, on: Mapping[str, Any], off: Mapping[str, Any]) -> Expression:
    """Return how a tool is told to compile by its options: one for the mode, and those for whether it compiles."""
    return lambda value, given: compiled(value, given, {**on, mode: value}, off)


def compiled(value: Value, given: Given, on: Mapping[str, Any] | str, off: Mapping[str, Any]) -> Told:
    """Return what tells a tool to compile, or not to.

    Args:
        on: options, or what the user does by hand.

    Raises:
        UsageError: the tool would accumulate gradients that CUDA graphs have overwritten.
    """
    if value == COMPILE.default:
        return Told(off)
    lack, options = (on, {}) if isinstance(on, str) else (None, on)
    if not replays(given.config):
        return Told(options, lack)
    if given.parts > 1:
        raise UsageError(
            f"{value} replays CUDA graphs, which overwrite the gradients that the tool would accumulate",
            advice=f"search again with --set {COMPILE.name}=off,default, or export with --format python.",
        )
    graphs = "replays CUDA graphs: clone what you keep of a step's outputs, and keep no gradients"
    return Told(options, f"{lack}; it {graphs}" if lack else graphs)
