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

from typing import Any

from autotune.base.records import Value
from autotune.knobs.memory_format import KNOB as LAYOUT
from autotune.profile.export.format import Given, Told, ToolFormat, by_itself, by_knob, compiling, of_loader

_PRECISIONS = {"fp32": "fp32", "tf32": "fp32", "bf16": "amp_bf16", "fp16": "amp_fp16"}


def _precision(value: Value, given: Given) -> Told:
    lack = None
    if value == "fp32" and given.cuda:
        lack = "the Trainer allows TF32: give it device=DeviceGPU(allow_tf32=False), which cuDNN then has not either"
    return Told({"trainer.precision": _PRECISIONS[str(value)]}, lack)


def _layout(value: Value, given: Given) -> Told:
    if value == LAYOUT.default:
        return Told()
    if value == "channels_last":
        return Told(lack="give the Trainer algorithms=[composer.algorithms.ChannelsLast()]")
    return Told(lack=f"model.to(memory_format=torch.{value}) before the Trainer, and the images of each batch alike")


class _Composer(ToolFormat):
    name = "composer"
    about = "MosaicML Composer"
    usage = 'Trainer(**told["trainer"]), DataLoader(**told["dataloader"])'
    place = 130
    start = "composer -n {ranks}"
    knobs = of_loader("dataloader.") | by_knob(
        precision=_precision,
        compile_mode=compiling("trainer.compile_config.mode", on={}, off={"trainer.compile_config": None}),
        batch_size=lambda value, given: Told({"dataloader.batch_size": given.batch_size}),
        gradient_accumulation=lambda value, given: Told(),
        memory_format=_layout,
        non_blocking=by_itself("the Trainer copies asynchronously, and has no option for it"),
        deterministic=lambda value, given: Told({"trainer.deterministic_mode": value}),
    )

    def always(self, given: Given) -> dict[str, Any]:
        trainer = {"trainer.device": "gpu" if given.cuda else "cpu"}
        return {**trainer, "trainer.device_train_microbatch_size": given.at_once, "dataloader.drop_last": True}


FORMAT = _Composer()
