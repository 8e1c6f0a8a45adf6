"""The first configurations, by design rather than by chance.

Ten random trials, which general samplers begin with, tell little about a space whose knobs fall into two groups
that hardly interact: what the device does, and what the loader does. The design starts from what usually wins
("the guess") and from there takes one step in every direction, the widest first.
"""

from __future__ import annotations

from collections.abc import Iterator

from autotune.records import Value
from autotune.space import Space, canonical, key


def designed(space: Space) -> list[dict[str, Value]]:
    """Distinct legal configurations to try before any sampler is asked, the most promising first.

    The baseline is not among them.
    """
    found: list[dict[str, Value]] = []
    seen = {key(space.baseline)}
    for config in _ideas(space):
        legal = canonical(config)
        if key(legal) not in seen and space.refusal(legal) is None:
            seen.add(key(legal))
            found.append(legal)
    return found


def _ideas(space: Space) -> Iterator[dict[str, Value]]:
    # Where the baseline's own value was left out by --set, the middle of what is left stands for it.
    base = {name: _nearest(space, name) for name in space.choices}
    device = base | {
        name: value
        for name, value in (
            ("precision", _first(space, "precision", "bf16", "fp16", "tf32")),
            ("memory_format", _first(space, "memory_format", "channels_last")),
            ("optimizer_impl", _first(space, "optimizer_impl", "fused", "foreach")),
            ("cudnn_benchmark", _first(space, "cudnn_benchmark", True)),
        )
        if value is not None
    }
    workers = _some_workers(space)
    loader = {
        name: value
        for name, value in (
            ("num_workers", workers),
            ("prefetch_factor", _first(space, "prefetch_factor", 4, 2)),
            ("persistent_workers", _first(space, "persistent_workers", True)),
            ("pin_memory", _first(space, "pin_memory", True)),
        )
        if value is not None
    }
    guess = device | loader
    yield device
    yield guess
    for batch in sorted(b for b in _numbers(space, "batch_size") if b > int(base["batch_size"]))[:2]:
        yield guess | {"batch_size": batch}
        yield device | {"batch_size": batch}
    compiled = _first(space, "compile_mode", "default", "max-autotune", "reduce-overhead")
    if compiled is not None:
        yield guess | {"compile_mode": compiled}
    for name in ("memory_format", "precision", "optimizer_impl", "cudnn_benchmark"):
        if name in base:
            yield guess | {name: base[name]}
    for count in _numbers(space, "num_workers"):
        if workers is not None and count > workers:
            yield guess | {"num_workers": count}
            break
    for threads in _numbers(space, "intra_op_threads"):
        yield guess | {"intra_op_threads": threads}
    for name in space.choices:
        if name.startswith("workload."):
            for value in space.legal(name):
                yield guess | {name: value}


def _nearest(space: Space, name: str) -> Value:
    legal = space.legal(name)
    stated = space.baseline.get(name)
    return stated if stated is not None and stated in legal else legal[len(legal) // 2]


def _first(space: Space, name: str, *wanted: Value) -> Value | None:
    """The first of the wanted values that is legal."""
    legal = space.legal(name) if name in space.choices else ()
    return next((value for value in wanted if value in legal), None)


def _numbers(space: Space, name: str) -> list[int]:
    return [int(value) for value in space.legal(name)] if name in space.choices else []


def _some_workers(space: Space) -> int | None:
    """The number of workers nearest to the cores, above none."""
    counts = [count for count in _numbers(space, "num_workers") if count > 0]
    threads = max(_numbers(space, "intra_op_threads"), default=8)
    return min(counts, key=lambda count: abs(count - threads), default=None)
