"""A snippet that stands alone: a training sets itself up with it as the trials did, without autotune.

It has ``loader(dataset, …)``, ``prepare(model, optimizer)`` and ``step(model, optimizer, loss_fn, batch)``, and holds
what the knobs of this profile do and nothing else. Importing it applies the switches of the process, so import it
before anything uses the GPU. ``loss_fn(model, batch)`` returns the loss, a mean over the samples. ``step`` returns it
detached, on the device; ``after_backward(model)`` is called with complete, unscaled gradients, for clipping.

```python
from fast import loader, prepare, step  # autotune export STUDY --format python -o fast.py

batches = loader(dataset, shuffle=True)
model, optimizer = prepare(model, optimizer)
for batch in batches:
    loss = step(model, optimizer, loss_fn, batch)
```
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autotune.base.errors import UsageError
from autotune.base.records import Value
from autotune.knobs import KNOBS
from autotune.knobs.alloc_conf import KNOB as ALLOCATOR
from autotune.knobs.alloc_conf import VARIABLES, setting_of
from autotune.knobs.batch_memory import KNOB as MEMORY
from autotune.knobs.batch_memory import in_slots
from autotune.knobs.batch_size import KNOB as BATCH_SIZE
from autotune.knobs.compile_mode import KNOB as COMPILE
from autotune.knobs.compile_mode import compiles, mode_of, replays
from autotune.knobs.cudnn_benchmark import KNOB as BENCHMARK
from autotune.knobs.deterministic import KNOB as DETERMINISTIC
from autotune.knobs.gradient_accumulation import KNOB as ACCUMULATION
from autotune.knobs.intra_op_threads import KNOB as THREADS
from autotune.knobs.malloc import KNOB as MALLOC
from autotune.knobs.memory_format import KNOB as LAYOUT
from autotune.knobs.memory_format import dimensions_of
from autotune.knobs.non_blocking import KNOB as NON_BLOCKING
from autotune.knobs.num_workers import KNOB as WORKERS
from autotune.knobs.num_workers import workers_of
from autotune.knobs.optimizer_impl import KNOB as OPTIMIZER
from autotune.knobs.persistent_workers import KNOB as PERSISTENT
from autotune.knobs.pin_memory import KNOB as PINNED
from autotune.knobs.precision import KNOB as PRECISION
from autotune.knobs.prefetch_factor import KNOB as PREFETCH
from autotune.profile.export.format import Given, Told, ToolFormat
from autotune.space import settings

_SWITCHES = (PRECISION, BENCHMARK, DETERMINISTIC, THREADS, ALLOCATOR, MALLOC)
_OTHERS = (BATCH_SIZE, COMPILE, ACCUMULATION, LAYOUT, NON_BLOCKING, OPTIMIZER)
_LOADERS = (WORKERS, PREFETCH, PERSISTENT, PINNED, MEMORY)
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}

_MOVE = '''
def move(batch):
    """Move a batch of whatever nesting to the device."""
    if isinstance(batch, torch.Tensor):
{tensor}
    if hasattr(batch, "to"):
        return batch.to(DEVICE)
    if isinstance(batch, dict):
        return {{name: move(part) for name, part in batch.items()}}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(move, batch))
    if dataclasses.is_dataclass(batch):
        fields = {{f.name: move(getattr(batch, f.name)) for f in dataclasses.fields(batch)}}
        return dataclasses.replace(batch, **fields)
    return type(batch)(map(move, batch)) if isinstance(batch, (tuple, list)) else batch
'''
_PART = '''
def part(batch, number, inside=False):
    """Return one of PARTS equal parts of a batch, whose tensors and lists have an item for each sample."""
    if isinstance(batch, dict):
        return {name: part(value, number, True) for name, value in batch.items()}
    if dataclasses.is_dataclass(batch):
        fields = {f.name: part(getattr(batch, f.name), number, True) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    if isinstance(batch, (tuple, list)):
        many = [p for p in batch if isinstance(p, (torch.Tensor, tuple, list)) and getattr(p, "ndim", 1)]
        if len(batch) != BATCH_SIZE or (not inside and any(len(p) == BATCH_SIZE for p in many)):
            values = [part(value, number, True) for value in batch]
            return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    elif batch is None or isinstance(batch, (str, bytes, int, float)) or getattr(batch, "ndim", 1) == 0:
        return batch
    if not isinstance(batch, (torch.Tensor, tuple, list)) or len(batch) != BATCH_SIZE:
        raise ValueError(f"a batch of {BATCH_SIZE} cannot be split: a {type(batch).__name__} has not as many items")
    size = BATCH_SIZE // PARTS
    return batch[number * size : (number + 1) * size]
'''


class _Python(ToolFormat):
    name = "python"
    about = "a training loop of your own"
    usage = "from FILE import loader, prepare, step"
    place = 50
    endings = (".py",)
    knobs = dict.fromkeys((knob.name for knob in (*_SWITCHES, *_OTHERS, *_LOADERS)), lambda value, given: Told())

    def caution(self, given: Given) -> str:
        return (
            "Call loader(dataset, shuffle=True) and prepare(model, optimizer), and for each batch\n"
            "step(model, optimizer, loss_fn, batch), where loss_fn(model, batch) returns the mean loss.\n"
            "Incomplete last batches are dropped, as they were in the trials."
        )

    def render(self, options: Mapping[str, Any], given: Given) -> str:
        if given.ranks > 1:
            raise UsageError(
                f"the code would train with one rank, and the profile is of {given.ranks}",
                advice="under torchrun, `autotune.load_profile(FILE).prepare(…)` sets up each rank.",
            )
        slots = [_slots()] if in_slots(given.config) else []
        parts = [_process(given), *slots, _loader(given), _prepare(given), _move(given)]
        parts += [_PART.strip()] * (given.parts > 1)
        return "\n\n\n".join([*parts, _step(given)]) + "\n"


FORMAT = _Python()


def _process(given: Given) -> str:
    """Return the imports, the constants, and the switches of the process."""
    config = given.config
    env: dict[str, str] = {}
    switches = [line for knob, value in settings(config) for line in _switch(knob.name, value)]
    if config.get(DETERMINISTIC.name):
        env |= DETERMINISTIC.environment(True)
    if config.get(ALLOCATOR.name, ALLOCATOR.default) != ALLOCATOR.default:
        env |= dict.fromkeys(VARIABLES, setting_of(config[ALLOCATOR.name]))
    lines = [f"os.environ[{_literal(name)}] = {_literal(value)}" for name, value in env.items()]
    ctypes = ["import ctypes"] * (config.get(MALLOC.name, MALLOC.default) != MALLOC.default)
    future = ["from __future__ import annotations", ""] * in_slots(config)
    lines = [*future, *ctypes, "import dataclasses", *(["import os", "", *lines] if env else []), ""]
    lines += ["import torch", "from torch.utils.data import DataLoader", ""]
    lines += [f'DEVICE = torch.device("{"cuda" if given.cuda else "cpu"}")', f"BATCH_SIZE = {given.batch_size}"]
    if given.parts > 1:
        given.at_once  # noqa: B018  (refuses what does not divide)
        lines.append(f"PARTS = {given.parts}")
    if config.get(PRECISION.name) == "fp16":
        lines.append("SCALER = torch.amp.GradScaler(DEVICE.type)")
    knobs = {name.removeprefix("workload."): value for name, value in config.items() if name not in KNOBS}
    if knobs:
        lines.append(f"WORKLOAD = {knobs!r}  # knobs of the workload: use them where your code decides")
    return "\n".join([*lines, *([""] if switches else []), *switches])


def _switch(name: str, value: Value) -> list[str]:
    if name == PRECISION.name and value == "tf32":
        return ['torch.set_float32_matmul_precision("high")']
    if name == BENCHMARK.name:
        return [f"torch.backends.cudnn.benchmark = {bool(value)}"]
    if name == DETERMINISTIC.name:
        return [f"torch.use_deterministic_algorithms({bool(value)})"]
    if name == THREADS.name:
        return [f"torch.set_num_threads({int(value)})"]
    if name == MALLOC.name and value != MALLOC.default:
        return [
            "# glibc keeps freed memory: no trimming (M_TRIM_THRESHOLD), no separate mappings (M_MMAP_MAX).",
            'if hasattr(ctypes.CDLL(None), "mallopt"):',
            "    ctypes.CDLL(None).mallopt(-1, -1)",
            "    ctypes.CDLL(None).mallopt(-4, 0)",
        ]
    if name == ALLOCATOR.name and value != ALLOCATOR.default:
        # If torch was imported earlier, it may have read the variables already; its setter has had two names.
        return [
            'for name in ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings"):',
            "    if hasattr(torch._C, name):",
            f"        getattr(torch._C, name)({_literal(setting_of(value))})",
            "        break",
        ]
    return []


def _loader(given: Given) -> str:
    options: dict[str, Any] = {}
    for knob, value in settings(given.config):
        options |= knob.loader_options(value)
    del options[BATCH_SIZE.name]
    if workers_of(given.config):
        options["multiprocessing_context"] = given.start_method
    options["drop_last"] = True
    slots = ['        "collate_fn": collate_in_slots,'] * in_slots(given.config)
    return "\n".join(
        [
            "def loader(dataset, **options):",
            '    """Return a DataLoader; options are its other arguments, and go first."""',
            "    own = {",
            f'        "{BATCH_SIZE.name}": BATCH_SIZE,',
            *(f'        "{name}": {_literal(value)},' for name, value in options.items()),
            *slots,
            "    }",
            "    return DataLoader(dataset, **{**own, **options})",
        ]
    )


def _slots() -> str:
    """Return the source of the agent's ``slots``, which needs nothing but torch."""
    spec = find_spec("autotune.agent.site.autotune_agent.slots")
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    _, found, source = text.partition("from __future__ import annotations\n")
    assert found
    return source.strip()


def _literal(value: Any) -> str:
    """Return source code for a value."""
    plain = isinstance(value, str) and value.isprintable() and not set(value) & {'"', "\\"}
    return f'"{value}"' if plain else repr(value)


def _prepare(given: Given) -> str:
    config = given.config
    lines = [
        "def prepare(model, optimizer):",
        '    """Set up a model and its optimizer, before its first step."""',
        "    model = model.to(DEVICE)",
    ]
    layout = config.get(LAYOUT.name, LAYOUT.default)
    if layout != LAYOUT.default:
        lines.append(f"    model = model.to(memory_format=torch.{layout})")
    if compiles(config):
        lines.append(f'    model.compile(mode="{mode_of(config)}")')
    implementation = config.get(OPTIMIZER.name)
    if implementation is not None:
        flags = ", ".join(f'("{name}", {name == implementation})' for name in ("foreach", "fused"))
        lines += [
            "    for group in (optimizer.defaults, *optimizer.param_groups):",
            f"        group.update((name, on) for name, on in ({flags}) if name in group)",
        ]
        # GradScaler leaves unscaling to optimizers that have this attribute; see `set_implementation`.
        if implementation == "fused":
            lines.append("    optimizer._step_supports_amp_scaling = not isinstance(optimizer, torch.optim.SGD)")
        elif config.get(PRECISION.name) == "fp16":
            lines.append('    if hasattr(optimizer, "_step_supports_amp_scaling"):')
            lines.append("        optimizer._step_supports_amp_scaling = False")
    return "\n".join([*lines, "    return model, optimizer"])


def _move(given: Given) -> str:
    config = given.config
    pinned = bool(config.get(PINNED.name, PINNED.default))
    asynchronous = ", non_blocking=True" if pinned and config.get(NON_BLOCKING.name, True) else ""
    layout = config.get(LAYOUT.name, LAYOUT.default)
    plain = f"        return batch.to(DEVICE{asynchronous})"
    if not dimensions_of(layout):
        return _MOVE.format(tensor=plain).strip()
    may_be_images = "(batch.is_floating_point() or batch.dtype is torch.uint8)"
    tensor = [
        f"        if batch.dim() == {dimensions_of(layout)} and {may_be_images}:",
        f"            return batch.to(DEVICE{asynchronous}, memory_format=torch.{layout})",
        plain,
    ]
    return _MOVE.format(tensor="\n".join(tensor)).strip()


def _step(given: Given) -> str:
    config, accumulates, graphs = given.config, given.parts > 1, replays(given.config)
    dtype = _DTYPES.get(str(config.get(PRECISION.name)))
    scales = config.get(PRECISION.name) == "fp16"
    forward = [f"loss = loss_fn(model, {'part(batch, number)' if accumulates else 'batch'})"]
    if dtype:
        forward = [f"with torch.autocast(DEVICE.type, dtype={dtype}):", f"    {forward[0]}"]
    forward += ["loss = loss / PARTS"] * accumulates
    forward.append("SCALER.scale(loss).backward()" if scales else "loss.backward()")
    if accumulates:
        forward.append("total += loss.detach()")
        if graphs:
            # The next replay of a CUDA graph would overwrite the gradients of the first.
            forward += [
                "if number == 0:",
                "    for parameter in model.parameters():",
                "        if parameter.grad is not None:",
            ]
            forward.append("            parameter.grad = parameter.grad.clone()")
        forward = [
            "total = torch.zeros((), device=DEVICE)",
            "for number in range(PARTS):",
            *(f"    {line}" for line in forward),
        ]
    update = ["if after_backward is not None:"]
    update += ["    SCALER.unscale_(optimizer)"] * scales
    update += ["    after_backward(model)"]
    update += ["SCALER.step(optimizer)", "SCALER.update()"] if scales else ["optimizer.step()"]
    result = "total" if accumulates else "loss.detach()"
    if graphs:
        # The next replay, which may be an evaluation's, overwrites outputs and gradients.
        update.append("optimizer.zero_grad(set_to_none=True)")
        result += "" if accumulates else ".clone()"
    body = ["batch = move(batch)", "optimizer.zero_grad(set_to_none=True)", *forward, *update, f"return {result}"]
    head = [
        "def step(model, optimizer, loss_fn, batch, after_backward=None):",
        '    """Take a training step with a batch, and return its loss, detached."""',
    ]
    return "\n".join([*head, *(f"    {line}" for line in body)])
