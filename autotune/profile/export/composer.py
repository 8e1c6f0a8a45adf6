"""Arguments of MosaicML Composer's ``Trainer`` and of the ``DataLoader``, as YAML with one section for each.

```python
told = yaml.safe_load(open(FILE))
loader = DataLoader(dataset, shuffle=True, **told["dataloader"])
Trainer(model=model, train_dataloader=loader, max_duration="90ep", **told["trainer"]).fit()
```

The loader gives whole batches, which the Trainer divides by ``device_train_microbatch_size``. On a GPU the Trainer
allows TF32 everywhere by itself. The names are those of Composer 0.32, which wants a PyTorch before 2.7.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.base.records import Value
from autotune.knobs.batch_size import KNOB as BATCH_SIZE
from autotune.knobs.compile_mode import KNOB as COMPILE
from autotune.knobs.deterministic import KNOB as DETERMINISTIC
from autotune.knobs.gradient_accumulation import KNOB as ACCUMULATION
from autotune.knobs.memory_format import KNOB as LAYOUT
from autotune.knobs.non_blocking import KNOB as NON_BLOCKING
from autotune.knobs.num_workers import KNOB as WORKERS
from autotune.knobs.persistent_workers import KNOB as PERSISTENT
from autotune.knobs.pin_memory import KNOB as PINNED
from autotune.knobs.precision import KNOB as PRECISION
from autotune.knobs.prefetch_factor import KNOB as PREFETCH
from autotune.profile.export.format import Given, Told, ToolFormat, as_yaml, compiled, nested, of_loader, workers

_PRECISIONS = {"fp32": "fp32", "tf32": "fp32", "bf16": "amp_bf16", "fp16": "amp_fp16"}


def _precision(value: Value, given: Given) -> Told:
    lack = None
    if value == "fp32" and given.cuda:
        lack = "the Trainer allows TF32: give it device=DeviceGPU(allow_tf32=False), which cuDNN then has not either"
    return Told({"trainer.precision": _PRECISIONS[str(value)]}, lack)


def _compile(value: Value, given: Given) -> Told:
    return compiled(value, given, {"trainer.compile_config.mode": value}, {"trainer.compile_config": None})


def _layout(value: Value, given: Given) -> Told:
    if value == LAYOUT.default:
        return Told()
    if value == "channels_last":
        return Told(lack="give the Trainer algorithms=[composer.algorithms.ChannelsLast()]")
    return Told(lack=f"model.to(memory_format=torch.{value}) before the Trainer, and the images of each batch alike")


def _non_blocking(value: Value, given: Given) -> Told:
    # Composer's devices copy tensors asynchronously.
    return Told() if value else Told(lack="the Trainer copies asynchronously, and has no option for it")


class _Composer(ToolFormat):
    name = "composer"
    about = "MosaicML Composer"
    usage = 'Trainer(**told["trainer"]), DataLoader(**told["dataloader"])'
    place = 130
    start = "composer -n {ranks}"
    knobs = {
        PRECISION.name: _precision,
        COMPILE.name: _compile,
        BATCH_SIZE.name: of_loader(BATCH_SIZE),
        ACCUMULATION.name: lambda value, given: Told(),
        LAYOUT.name: _layout,
        WORKERS.name: workers,
        PREFETCH.name: of_loader(PREFETCH),
        PINNED.name: of_loader(PINNED),
        NON_BLOCKING.name: _non_blocking,
        PERSISTENT.name: of_loader(PERSISTENT),
        DETERMINISTIC.name: lambda value, given: Told({"trainer.deterministic_mode": value}),
    }

    def always(self, given: Given) -> dict[str, Any]:
        trainer = {"trainer.device": "gpu" if given.cuda else "cpu"}
        return {**trainer, "trainer.device_train_microbatch_size": given.at_once, "dataloader.drop_last": True}

    def render(self, options: Mapping[str, Any], given: Given) -> str:
        return as_yaml(nested(options))


FORMAT = _Composer()
