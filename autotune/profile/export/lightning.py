"""Arguments of Lightning's ``Trainer`` and of the ``DataLoader``, as YAML with one section for each.

```python
told = yaml.safe_load(open(FILE))
trainer = Trainer(max_epochs=90, **told["trainer"])
trainer.fit(module, DataLoader(dataset, shuffle=True, **told["dataloader"]))
```

What Lightning leaves to the module is named at the top of the file: the model's layout, the compiler, the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.base.records import Value
from autotune.knobs.batch_size import KNOB as BATCH_SIZE
from autotune.knobs.compile_mode import KNOB as COMPILE
from autotune.knobs.cudnn_benchmark import KNOB as BENCHMARK
from autotune.knobs.deterministic import KNOB as DETERMINISTIC
from autotune.knobs.gradient_accumulation import KNOB as ACCUMULATION
from autotune.knobs.non_blocking import KNOB as NON_BLOCKING
from autotune.knobs.num_workers import KNOB as WORKERS
from autotune.knobs.persistent_workers import KNOB as PERSISTENT
from autotune.knobs.pin_memory import KNOB as PINNED
from autotune.knobs.precision import KNOB as PRECISION
from autotune.knobs.prefetch_factor import KNOB as PREFETCH
from autotune.profile.export.format import (
    Given,
    Told,
    ToolFormat,
    as_yaml,
    by_hand,
    compiled,
    nested,
    of_loader,
    workers,
)

_PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def _precision(value: Value, given: Given) -> Told:
    lack = by_hand(PRECISION.name, value, cuda=given.cuda) if value == "tf32" else None
    return Told({"trainer.precision": _PRECISIONS[str(value)]}, lack)


def _compile(value: Value, given: Given) -> Told:
    return compiled(value, given, by_hand(COMPILE.name, value, cuda=given.cuda), {})


def _non_blocking(value: Value, given: Given) -> Told:
    # Lightning copies tensors asynchronously whenever they go to a GPU.
    return Told() if value else Told(lack="Lightning copies asynchronously: override transfer_batch_to_device")


class _Lightning(ToolFormat):
    name = "lightning"
    about = "Lightning"
    usage = 'Trainer(**told["trainer"]), DataLoader(**told["dataloader"])'

    place = 90
    start = "the Trainer starts them"
    knobs = {
        PRECISION.name: _precision,
        COMPILE.name: _compile,
        BATCH_SIZE.name: lambda value, given: Told({f"dataloader.{BATCH_SIZE.name}": given.at_once}),
        ACCUMULATION.name: lambda value, given: Told({"trainer.accumulate_grad_batches": given.parts}),
        WORKERS.name: workers,
        PREFETCH.name: of_loader(PREFETCH),
        PINNED.name: of_loader(PINNED),
        NON_BLOCKING.name: _non_blocking,
        PERSISTENT.name: of_loader(PERSISTENT),
        BENCHMARK.name: lambda value, given: Told({"trainer.benchmark": value}),
        DETERMINISTIC.name: lambda value, given: Told({f"trainer.{DETERMINISTIC.name}": value}),
    }

    def always(self, given: Given) -> dict[str, Any]:
        device = {"trainer.accelerator": "gpu" if given.cuda else "cpu", "trainer.devices": given.ranks}
        strategy = {"trainer.strategy": "ddp"} if given.ranks > 1 else {}
        return {**device, **strategy, "dataloader.drop_last": True}

    def render(self, options: Mapping[str, Any], given: Given) -> str:
        return as_yaml(nested(options))


FORMAT = _Lightning()
