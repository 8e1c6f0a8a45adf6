"""Arguments of Lightning's ``Trainer`` and of the ``DataLoader``, as YAML with one section for each.

```python
told = yaml.safe_load(open(FILE))
trainer = Trainer(max_epochs=90, **told["trainer"])
trainer.fit(module, DataLoader(dataset, shuffle=True, **told["dataloader"]))
```

What Lightning leaves to the module is named at the top of the file: the model's layout, the compiler, the optimizer.
"""

from __future__ import annotations

from typing import Any

from autotune.base.records import Value
from autotune.knobs.compile_mode import KNOB as COMPILE
from autotune.knobs.precision import KNOB as PRECISION
from autotune.profile.export.format import Given, Told, ToolFormat, by_hand, by_itself, by_knob, compiled, of_loader

_PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def _precision(value: Value, given: Given) -> Told:
    lack = by_hand(PRECISION.name, value, cuda=given.cuda) if value == "tf32" else None
    return Told({"trainer.precision": _PRECISIONS[str(value)]}, lack)


def _compile(value: Value, given: Given) -> Told:
    return compiled(value, given, by_hand(COMPILE.name, value, cuda=given.cuda), {})


class _Lightning(ToolFormat):
    name = "lightning"
    about = "Lightning"
    usage = 'Trainer(**told["trainer"]), DataLoader(**told["dataloader"])'
    place = 90
    start = "the Trainer starts them"
    knobs = of_loader("dataloader.") | by_knob(
        precision=_precision,
        compile_mode=_compile,
        batch_size=lambda value, given: Told({"dataloader.batch_size": given.at_once}),
        gradient_accumulation=lambda value, given: Told({"trainer.accumulate_grad_batches": given.parts}),
        non_blocking=by_itself("Lightning copies asynchronously: override transfer_batch_to_device"),
        cudnn_benchmark=lambda value, given: Told({"trainer.benchmark": value}),
        deterministic=lambda value, given: Told({"trainer.deterministic": value}),
    )

    def always(self, given: Given) -> dict[str, Any]:
        device = {"trainer.accelerator": "gpu" if given.cuda else "cpu", "trainer.devices": given.ranks}
        strategy = {"trainer.strategy": "ddp"} if given.ranks > 1 else {}
        return {**device, **strategy, "dataloader.drop_last": True}


FORMAT = _Lightning()
