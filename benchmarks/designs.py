"""The parts of the workloads' spaces that are recorded as surfaces."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

from pydantic import Field

from autotune.base.records import Config, HeatPlan, Record, Side, Value
from autotune.search.replay import PARTS
from autotune.space import canonical, device_part, is_loaders, key, why_apart
from autotune.study.launches import turn_s_for

#: Rounds of a heat, with turns as long as in searches of ten minutes, and no end before these rounds are taken.
HEAT_ROUNDS, HEATS_OF_S, FOREVER_S = 8, 600.0, 1e6
#: Limits on the number of configurations, total and compiled, so that recording takes an hour or two.
MOST, MOST_COMPILED = 200, 40


class Design(Record):
    """The part of a space to record: the configurations of all blocks together.

    Attributes:
        workload: a catalog name, or the stem of a file in `benchmarks/workloads/`.
        base: values of knobs that are the same in all blocks unless a block overrides them.
        blocks: the Cartesian product of each block's values is recorded.
    """

    name: str
    workload: str
    args: dict[str, str] = Field(default_factory=dict)
    data: str = "generated"
    device: str = "auto"
    batch_size: int = 32
    image_size: int | None = None
    memory_limit_bytes: int | None = None
    base: dict[str, Value] = Field(default_factory=dict)
    blocks: tuple[dict[str, tuple[Value, ...]], ...]

    def configurations(self) -> list[dict[str, Value]]:
        """Return each configuration once, in canonical form.

        Raises:
            SystemExit: there are more than can be recorded.
        """
        found = {
            key(config): config
            for block in self.blocks
            for values in product(*block.values())
            for config in [canonical({**self.base, **dict(zip(block, values, strict=True))})]
        }
        compiled = sum(config.get("compile_mode", "off") != "off" for config in found.values())
        if len(found) > MOST or compiled > MOST_COMPILED:
            raise SystemExit(f"{len(found)} configurations, {compiled} compiled: more than {MOST} or {MOST_COMPILED}")
        return list(found.values())

    def shuffled(self, seed: int = 0) -> list[dict[str, Value]]:
        """Return the configurations in random order."""
        found = self.configurations()
        random.Random(seed).shuffle(found)
        return found


_EAGER: dict[str, Value] = {"compile_mode": "off", "prefetch_factor": 2, "persistent_workers": True}
_DTYPES: dict[str, tuple[Value, ...]] = {
    "precision": ("fp32", "bf16"),
    "memory_format": ("contiguous", "channels_last"),
}
#: What nearly every training on a card sets.
_FAST_INPUT: dict[str, tuple[Value, ...]] = {"pin_memory": (True,), "cudnn_benchmark": (True,)}
DESIGNS = {
    one.name: one
    for one in (
        Design(
            name="resnet18-jpeg",
            workload="resnet18",
            image_size=96,
            base={**_EAGER, "optimizer_impl": "foreach"},
            blocks=(
                {**_DTYPES, "batch_size": (16, 32, 64), "num_workers": (0, 1, 2), "intra_op_threads": (1, 2)},
                {
                    **_DTYPES,
                    "batch_size": (32, 64),
                    "num_workers": (0, 2),
                    "intra_op_threads": (2,),
                    "compile_mode": ("default",),
                },
            ),
        ),
        Design(
            name="mobilenet-slow-store",
            workload="slow_store",
            batch_size=16,
            image_size=64,
            base={**_EAGER, "optimizer_impl": "foreach", "intra_op_threads": 2},
            blocks=({**_DTYPES, "batch_size": (16, 32, 64), "num_workers": (0, 1, 2, 4, 8, 16)},),
        ),
        Design(
            name="resnet18-tight-memory",
            workload="resnet18",
            data="synthetic",
            image_size=64,
            memory_limit_bytes=560 * 2**20,
            base={**_EAGER, "num_workers": 0, "intra_op_threads": 2},
            blocks=({**_DTYPES, "batch_size": (16, 32, 64, 128, 256), "optimizer_impl": ("for-loop", "fused")},),
        ),
        # What is commonly faster is slower here on some machines: bf16, and large batches.
        Design(
            name="mobilenet-in-memory",
            workload="slow_store",
            args={"wait_ms": "0"},
            batch_size=64,
            image_size=64,
            base={**_EAGER, "optimizer_impl": "foreach"},
            blocks=(
                {
                    **_DTYPES,
                    "batch_size": (16, 32, 64, 128),
                    "num_workers": (0, 1, 2),
                    "intra_op_threads": (1, 2),
                },
            ),
        ),
        # Held out: recorded after the sampler's models were finished, and not used to develop them.
        Design(
            name="text-encoder",
            workload="text_encoder",
            base={**_EAGER, "memory_format": "contiguous", "intra_op_threads": 2},
            blocks=(
                {
                    "precision": ("fp32", "bf16"),
                    "batch_size": (16, 32, 64),
                    "num_workers": (0, 1, 2),
                    "optimizer_impl": ("for-loop", "fused"),
                },
                {
                    "precision": ("fp32", "bf16"),
                    "batch_size": (32, 64),
                    "num_workers": (0, 2),
                    "optimizer_impl": ("fused",),
                    "compile_mode": ("default",),
                },
            ),
        ),
        # Of a card, by `python -m benchmarks.card --part surface`.
        Design(
            name="resnet50-card",
            workload="resnet50",
            device="cuda:0",
            image_size=224,
            base={**_EAGER, "optimizer_impl": "foreach"},
            blocks=(
                # PyTorch's defaults first.
                {
                    "precision": ("fp32",),
                    "memory_format": ("contiguous",),
                    "batch_size": (32,),
                    "num_workers": (0, 4),
                    "pin_memory": (False,),
                    "cudnn_benchmark": (False,),
                },
                {
                    **_FAST_INPUT,
                    "precision": ("tf32", "bf16"),
                    "memory_format": ("contiguous", "channels_last"),
                    "batch_size": (32, 128, 512),
                    "num_workers": (4, 8, 14),
                },
                {
                    **_FAST_INPUT,
                    "precision": ("fp32", "fp16"),
                    "memory_format": ("contiguous", "channels_last"),
                    "batch_size": (64, 256),
                    "num_workers": (8,),
                },
                {
                    **_FAST_INPUT,
                    "precision": ("bf16",),
                    "memory_format": ("channels_last",),
                    "batch_size": (64, 192, 256, 384, 768, 1024),
                    "num_workers": (0, 2, 8, 14),
                },
                {
                    "precision": ("bf16",),
                    "memory_format": ("channels_last",),
                    "batch_size": (128, 256),
                    "num_workers": (14,),
                    "pin_memory": (False, True),
                    "cudnn_benchmark": (False, True),
                    "optimizer_impl": ("foreach", "fused"),
                },
                {
                    **_FAST_INPUT,
                    "precision": ("bf16",),
                    "memory_format": ("channels_last",),
                    "batch_size": (128, 256, 384, 512),
                    "num_workers": (8, 14),
                    "compile_mode": ("default", "reduce-overhead"),
                },
            ),
        ),
        # Of nothing: the fewest launches with which a recording can be tried.
        Design(
            name="rehearsal",
            workload="small_conv",
            data="synthetic",
            device="cpu",
            batch_size=16,
            image_size=32,
            base={**_EAGER, "num_workers": 0, "intra_op_threads": 1},
            blocks=({"precision": ("fp32", "bf16"), "batch_size": (16,)},),
        ),
    )
}
#: A hundred configurations that one might try by hand.
GRID = Design(
    name="resnet18-grid",
    workload="resnet18",
    image_size=96,
    base={**_EAGER, "optimizer_impl": "foreach", "intra_op_threads": 2},
    blocks=(
        {**_DTYPES, "batch_size": (16, 32, 64, 128), "num_workers": (0, 1, 2), "intra_op_threads": (1, 2)},
        {
            "precision": ("bf16",),
            "memory_format": ("channels_last",),
            "batch_size": (64, 128),
            "num_workers": (0, 2),
            "compile_mode": ("default",),
        },
    ),
)


def heats(side: Side, configurations: Sequence[Config], baseline: Config) -> list[HeatPlan]:
    """Return heats of one side with each part of these configurations that it depends on, as few as possible."""
    parts = {key(PARTS[side](config)): PARTS[side](config) for config in [baseline, *configurations]}
    rest = {n: v for n, v in baseline.items() if is_loaders(n) == (side == "device")}
    groups: list[list[dict[str, Value]]] = []
    for part in parts.values():
        # Any knob of the other side does: it has no effect here.
        config = canonical({**baseline, **part} if side == "loader" else {**rest, **part})
        for group in groups:
            apart = why_apart(group[0], config) if side == "device" else device_part(group[0]) != device_part(config)
            if not apart:
                group.append(config)
                break
        else:
            groups.append([config])
    return [
        HeatPlan(
            side=side,
            entrants=tuple(group),
            turn_s=turn_s_for(HEATS_OF_S)[side],
            max_rounds=HEAT_ROUNDS,
            all_rounds=True,
            max_s=FOREVER_S,
        )
        for group in groups
        if len(group) > 1
    ]
