"""The contract of a workload."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from autotune.base.errors import UnknownNameError, WorkloadError
from autotune.base.records import DataRef, Value, WorkloadRef

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

# The contract of a workload: what a file in ``models/``, or the user's own file, defines.
#
# A workload is a module (or an object in one) with four required functions and some optional ones. Every function takes
# the same frozen `Context` first, so that none needs globals:
#
# ========================  ==========================================================================
# ``model(ctx)``            -> ``torch.nn.Module`` on the CPU; autotune moves it to ``ctx.device``
# ``dataset(ctx)``          -> a ``torch.utils.data.Dataset`` or ``IterableDataset``; it does its own decoding and
#                           augmentation, which belong in the loader's workers. An iterable one shuffles itself and
#                           divides itself among workers
# ``optimizer(ctx, m)``     -> ``torch.optim.Optimizer`` over ``m``'s parameters, created after ``m`` was moved
# ``loss(ctx, m, batch)``   -> scalar tensor, shape ``()``, connected to the graph. ``batch`` is the output of
#                           the collate function, with all tensors on the device. Called under autocast if
#                           the precision knob says so
# *optional*
# ``loader(ctx, options)``  -> what is iterated for batches, epoch after epoch. ``options`` are the keyword arguments
#                           that a ``DataLoader`` would get under the configuration (``dataset``, ``batch_size``,
#                           ``num_workers``, ``collate_fn``, …): pass them on with a sampler of your own, or read those
#                           that another kind of loader understands (default: ``DataLoader(**options)``)
# ``collate(ctx)``          -> the function that turns a list of samples into a batch (default: PyTorch's)
# ``samples(ctx, batch)``   -> int: the number of samples in the batch (default: ``ctx.batch_size``)
# ``after_backward(ctx, m)``   gradients are complete and unscaled: the place to clip them
# ``after_step(ctx, m)``       the weights have been updated: the place for an EMA
# ``parallel(ctx, m)``      -> how several ranks share the training of ``m``, which is on its device: ``m`` sharded by
#                           ``torch.distributed.fsdp.fully_shard``, say. The process group is initialized (default:
#                           ``DistributedDataParallel`` averages gradients; with one rank, nothing is called)
# ``evaluate(ctx, m, batch)``  one batch of an evaluation pass, called in evaluation mode, without gradients
#                           and under the precision knob's autocast. Run to check that it fits into memory beside the
#                           training, which discards its result, and after each epoch of a whole training, which
#                           averages it over the samples: a number, or a dict of numbers by name (default: ``loss``)
# ``metric(ctx, m)``        -> float: how well the model does after some steps of training, measured in any way on any
#                           data. Called in evaluation mode, without gradients and under the precision knob's autocast,
#                           when a finalist is checked: it must come out as it does in eager fp32. In a whole training
#                           it is reported after each epoch, by the first rank if there are several
# ``largest_sample(ctx, d)``   -> the sample of the data set ``d`` that takes the most memory, to check that it fits
#                           (default: if shapes vary, the largest of some that are looked at)
# *optional, for whole trainings only* (``autotune train --epochs``)
# ``validation(ctx)``       -> the data set that is evaluated after each epoch, in order and including its last batch,
#                           however small; ``None`` for none (default: none, and ``evaluate`` is not called). One with
#                           a length is divided among ranks
# ``schedule(ctx, o, n)``   -> the learning-rate scheduler of the optimizer ``o``, stepped after each of the ``n`` steps
#                           of the training; ``n`` is ``None`` if the length of an epoch is not known
# ``state(ctx, m)``         -> the training's state besides weights, buffers and optimizer (an average of the weights in
#                           a variable of the file, say), made of tensors, numbers, text, and dicts, lists and tuples
#                           of them: anything else is refused. Also called after the first step. If there are several
#                           ranks, all call it, the first one's result is kept, and all get that back
# ``load_state(ctx, m, s)``    restore that state when a training resumes
# *constants, optional*
# ``BATCH_SIZE``            the batch size of the baseline when the user states none (default 32)
# ``IMAGE_SIZE``            side in pixels on a GPU; ``CPU_IMAGE_SIZE`` on a CPU (default: the same)
# ``DATA``                  ``"images"``: runs on autotune's generated photographs, or on ``--data DIR``;
#                           ``None`` (default): the workload brings its own data
# ``VARYING_SHAPES``        True when tensor shapes differ from batch to batch, including those of box lists. On a GPU,
#                           image shapes are examined regardless of this constant
# ``KNOBS``                 ``{"name": (baseline, other, ...)}``: the workload's own knobs, searched as
#                           ``workload.name`` and read with ``ctx.knob("name")``. `knob` declares whether a
#                           knob changes the maths
# ``DDP``                   ``{"find_unused_parameters": True}``: arguments that ``DistributedDataParallel`` needs to
#                           train this model in several ranks
# ``ARGS``                  ``{"name": "default"}``: what ``--arg name=value`` may set, read with ``ctx.arg``
# ========================  ==========================================================================
#
# A batch may be a tensor, or any nesting of tuples, lists, dicts and dataclasses of tensors; anything else passes
# through untouched. Batches of images are ``(N, C, H, W)``.

#: The required functions, each with the number of its arguments besides the context.
REQUIRED = {"model": 0, "dataset": 0, "optimizer": 1, "loss": 2}
OPTIONAL = (
    *("loader", "collate", "samples", "after_backward", "after_step", "parallel", "evaluate", "metric"),
    "largest_sample",
    *("validation", "schedule", "state", "load_state"),
)
CONSTANTS = ("BATCH_SIZE", "IMAGE_SIZE", "CPU_IMAGE_SIZE", "DATA", "VARYING_SHAPES", "KNOBS", "DDP", "ARGS")
#: In a file that `autotune.tune` has written, a dictionary of these by name, if other things have their names there.
PARTS = "_AUTOTUNE_PARTS"
DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True)
class Context:
    """The parameters passed to every function of a workload.

    Attributes:
        device: a torch device string, ``"cpu"`` or ``"cuda:0"``.
        batch_size: samples per batch made by the loader.
        image_size: side of a square image in pixels, or ``None`` for a workload without images.
        seed: seed for everything random.
        data: where the data is (``data.kind``, ``data.path``).
        rank, ranks: this rank, from 0, and the number of ranks. Samples of a data set with a length are divided among
            them; an iterable one divides itself.
    """

    device: str
    batch_size: int
    image_size: int | None
    seed: int
    data: DataRef
    args: Mapping[str, str] = field(default_factory=dict)
    knobs: Mapping[str, Value] = field(default_factory=dict)
    rank: int = 0
    ranks: int = 1

    def knob(self, name: str) -> Value:
        """Return the value of the workload's own knob ``name`` (declared in ``KNOBS``).

        Raises:
            UnknownNameError: the workload declares no such knob.
        """
        try:
            return self.knobs[name]
        except KeyError:
            raise UnknownNameError("knob of the workload", name, self.knobs) from None

    def arg(self, name: str) -> str:
        """Return the text given as ``--arg name=…``, or the default in ``ARGS``.

        Raises:
            UnknownNameError: the workload declares no such argument.
        """
        try:
            return self.args[name]
        except KeyError:
            raise UnknownNameError("argument of the workload", name, self.args) from None


class OwnKnob(tuple[Value, ...]):
    """The values of a workload's own knob, the baseline's first, made by `knob`.

    Attributes:
        changes_maths, searched: see `knob`.
    """

    changes_maths: bool | None
    searched: bool | Literal["cuda"]

    def __new__(
        cls,
        values: Iterable[Value],
        changes_maths: bool | None = None,
        *,
        searched: bool | Literal["cuda"] = True,
    ) -> OwnKnob:
        instance = super().__new__(cls, values)
        instance.changes_maths = changes_maths
        instance.searched = searched
        return instance

    def __repr__(self) -> str:
        return f"knob({', '.join(map(repr, self))}, changes_maths={self.changes_maths}, searched={self.searched})"


def knob(*values: Value, changes_maths: bool | None = None, searched: bool | Literal["cuda"] = True) -> OwnKnob:
    """Declare one of the workload's own knobs: ``KNOBS = {"checkpointing": knob(False, True, changes_maths=False)}``.

    Args:
        values: the values to search, the baseline's first.
        changes_maths: False for a knob that changes only the speed, such as checkpointing. It counts as the same
            training, and must train as the baseline does to win. True for one that intentionally changes what is
            trained, such as a number of layers: a configuration is then checked against eager fp32 with the same value.
            If not stated, it counts as another training, but must train as the baseline does to win.
        searched: False for a knob that takes part only if the user states values (``--set workload.name=a,b``);
            ``"cuda"`` for one that does so on any device but a GPU.
    """
    return OwnKnob(values, changes_maths, searched=searched)


class Workload(Protocol):
    """The four required functions, as a type. See the comment above for shapes and optional functions."""

    def model(self, ctx: Context) -> torch.nn.Module: ...
    def dataset(self, ctx: Context) -> Dataset[Any]: ...
    def optimizer(self, ctx: Context, model: torch.nn.Module) -> torch.optim.Optimizer: ...
    def loss(self, ctx: Context, model: torch.nn.Module, batch: Any) -> torch.Tensor: ...


def load(ref: WorkloadRef) -> Workload:
    """Import a workload and check that it is one. Runs user code, so only children and the user's own training
    call it.

    A file is imported under its stem, with its folder first on ``sys.path``, so that its classes can be unpickled in
    loader workers under every start method.

    Raises:
        WorkloadError: the file raises on import, its stem is taken, or a required function is missing.
    """
    if ref.path is not None:
        module = _import_file(Path(ref.path), ref.module)
    else:
        module = _import_module(ref.module)
    parts = getattr(module, PARTS, None)
    workload: Any = module if parts is None else SimpleNamespace(**parts)
    if ref.attribute is not None:
        try:
            workload = getattr(module, ref.attribute)
        except AttributeError:
            raise WorkloadError(
                f"module {ref.module} has no {ref.attribute!r}",
                advice="name the workload as package.module:NAME, where NAME is defined in that module.",
            ) from None
        if isinstance(workload, type):
            workload = workload()
    missing = [name for name in REQUIRED if not callable(getattr(workload, name, None))]
    if missing:
        raise WorkloadError(
            f"{ref.name} is no workload: it defines no {', '.join(missing)}",
            advice="a workload defines the functions " + ", ".join(f"{name}(ctx…)" for name in REQUIRED) + ".",
        )
    for name in ("IMAGE_SIZE", "CPU_IMAGE_SIZE", "BATCH_SIZE"):
        value = getattr(workload, name, None)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise WorkloadError(f"{ref.name}: {name} must be a positive integer, not {value!r}")
    _check_declared(workload, ref.name)
    return cast(Workload, workload)


def _check_declared(found: Any, name: str) -> None:
    """Check the types of ``KNOBS``, ``ARGS`` and ``DATA``, which autotune reads itself."""
    for constant, example in (("KNOBS", '{"name": (baseline, other)}'), ("ARGS", '{"name": "default"}')):
        declared = getattr(found, constant, {})
        if not isinstance(declared, Mapping) or not all(isinstance(key, str) for key in declared):
            raise WorkloadError(
                f"{name}: {constant} must be a dictionary with names as keys, not {declared!r:.60}",
                advice=f"write it as {constant} = {example}.",
            )
    for knob, values in getattr(found, "KNOBS", {}).items():
        if not isinstance(values, tuple | list) or not values or not all(map(_is_value, values)):
            raise WorkloadError(
                f"{name}: KNOBS[{knob!r}] must be a tuple of numbers, text or booleans, not {values!r:.60}",
                advice="the first of them is the baseline's.",
            )
    data = getattr(found, "DATA", None)
    if data is not None and not isinstance(data, str):
        raise WorkloadError(f'{name}: DATA must be "images" or None, not {data!r:.60}')


def _is_value(value: Any) -> bool:
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def _import_module(name: str) -> Any:
    # Users run autotune from their project folder, which a console script does not have on its path.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise WorkloadError(
                f"no module named {name!r} can be imported from here",
                advice="run autotune where `python -c 'import …'` finds it, or give the file's path.",
            ) from error
        raise


def _import_file(path: Path, stem: str) -> Any:
    folder = str(path.parent)
    imported = sys.modules.get(stem)
    if imported is not None and getattr(imported, "__file__", None) == str(path):
        return imported
    spec = importlib.util.find_spec(stem) if imported is None else imported.__spec__
    if spec is not None and spec.origin != str(path):
        raise WorkloadError(
            f"the name of {path.name} is taken: {stem!r} is already importable here",
            advice="rename the file; its classes must be importable by a name of their own.",
        )
    sys.path.insert(0, folder)
    if b"autotune.carrying" in path.read_bytes():
        # Files written by earlier versions of `autotune.tune` import it by this name.
        sys.modules["autotune.carrying"] = importlib.import_module("autotune.workload.carrying")
    return importlib.import_module(stem)


def args_of(workload: Workload, ref: WorkloadRef) -> dict[str, str]:
    """Return the workload's ``ARGS``, overridden by the user's.

    Raises:
        UnknownNameError: an ``--arg`` that the workload does not declare.
    """
    declared: dict[str, str] = {k: str(v) for k, v in getattr(workload, "ARGS", {}).items()}
    for name in ref.args:
        if name not in declared:
            advice = None if declared else f"{ref.name} takes no --arg."
            raise UnknownNameError("argument", name, declared, advice=advice)
    return {**declared, **ref.args}


def takes_context(function: Callable[..., Any], others: int) -> bool:
    """Return whether a function is written for a workload, with a `Context` before its other arguments.

    Args:
        others: number of its other arguments: 0 for ``model`` and ``dataset``, 1 for ``optimizer``, 2 for ``loss``.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional and positional[0].name in ("ctx", "context"):
        return True
    required = sum(p.default is p.empty for p in positional)
    return required > others or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def without_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that takes no `Context` as one of a workload. The result may also be called without a context."""

    def called(*arguments: Any) -> Any:
        return function(*(arguments[1:] if arguments and isinstance(arguments[0], Context) else arguments))

    return called


def optional(workload: Workload, name: str) -> Callable[..., Any] | None:
    """Return an optional function of the workload, or ``None``."""
    function = getattr(workload, name, None)
    return function if callable(function) else None


# Data sets that wrap another one: to time it, to repeat it, or to put a store in front of it.


class Wrapper:
    """The base of all wrappers. A workload's own loader may ask for more than samples, such as their lengths.

    Args:
        inner: the wrapped data set.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        # During unpickling, ``inner`` is not set yet. Special methods of PyTorch or Python, such as `__getitems__`,
        # would bypass the wrapper.
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def many(self, indices: list[Any]) -> list[Any]:
        """Return the wrapped data set's samples at these indices, in one call if it supports that."""
        at_once = getattr(self.inner, "__getitems__", None)
        return list(at_once(indices)) if at_once else [self.inner[index] for index in indices]


def innermost(dataset: Any) -> Any:
    """Return the data set inside all wrappers."""
    while isinstance(dataset, Wrapper):
        dataset = dataset.inner
    return dataset
