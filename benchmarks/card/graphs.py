"""The part on CUDA graphs with an evaluation between epochs, and its training, in a process of its own."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.card.stage import NO_TIME, Stage, tail

#: Steps of an epoch, evaluated batches, epochs: on a card and in a rehearsal. In each epoch the last evaluated batch
#: has another size, as of a data set that does not divide.
LONG, SHORT = (40, 10, 4), (3, 2, 2)


def graphs(stage: Stage) -> None:
    """Train with ``reduce-overhead`` and evaluate between epochs; note memory and the number of graphs after each."""
    stage.replaced("mode default instead of reduce-overhead: a CPU has no graphs, so they are 0")
    mode, device = ("default", "cpu") if stage.uuid is None else ("reduce-overhead", "cuda")
    sizes = [str(size) for size in stage.pick(LONG, SHORT)]
    failed = []
    for same in ("same", "varying"):
        if stage.left_s < 30:
            stage.add("epochs", {"evaluation": same, "what": NO_TIME})
            continue
        command = ("-m", "benchmarks.card.graphs", device, mode, same, *sizes)
        ended = stage.python(*command, limit_s=min(stage.left_s - 20, stage.pick(180.0, 60.0)))
        for line in ended.stdout.splitlines():
            stage.add("epochs", {"evaluation": same, **json.loads(line)})
        if ended.returncode:
            failed.append(f"{same}: ended with {ended.returncode}: {tail(ended.stderr, 6)}")
    if failed:
        raise RuntimeError("\n".join(failed))


def main() -> None:
    """Train and evaluate as `graphs` says, and print a JSON object for each epoch and each evaluation."""
    device, mode, evaluation, *sizes = sys.argv[1:]
    steps, batches, epochs = map(int, sizes)
    for row in _epochs(device, mode, evaluation == "varying", steps, batches, epochs):
        print(json.dumps(row), flush=True)


def _epochs(device: str, mode: str, varying: bool, steps: int, batches: int, epochs: int) -> Iterator[dict[str, Any]]:
    import torch
    from torch.nn.functional import cross_entropy
    from torchvision.models import resnet
    from torchvision.models.resnet import BasicBlock, ResNet

    from autotune.base.records import Config
    from autotune.training import step as training
    from autotune.training.process_settings import process

    captured = _counting_captures()
    small = device == "cpu"
    batch, size = (4, 32) if small else (128, 224)
    config: Config = {
        "precision": "bf16",
        "memory_format": "channels_last",
        "compile_mode": mode,
        "batch_size": batch,
        "optimizer_impl": "foreach",
    }
    process(config)
    torch.manual_seed(0)
    made = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10) if small else resnet.resnet50(num_classes=10)
    model = training.apply_model(made.train(), config, device)
    optimizer = training.apply_optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), config)
    step = training.Step(model, optimizer, lambda m, b: cross_entropy(m(b[0]), b[1]), config, device)
    pool = [(torch.randn(batch, 3, size, size), torch.randint(10, (batch,))) for _ in range(4)]

    def row(what: str, began: float, loss: float, count: int) -> dict[str, Any]:
        told: dict[str, Any] = {"what": what, "seconds": round(time.monotonic() - began, 2), "steps": count}
        told |= {"loss": loss, "finite": math.isfinite(loss), "graphs": captured[0]}
        if not small:
            free, total = torch.cuda.mem_get_info()
            told |= {
                "allocated_bytes": torch.cuda.memory_allocated(),
                "reserved_bytes": torch.cuda.memory_reserved(),
                "used_on_card_bytes": total - free,
            }
        return told

    def evaluate() -> float:
        model.eval()
        total = 0.0
        plan = training.step_plan(config)
        with torch.no_grad(), training.autocast(torch.device(device), plan):
            for number in range(batches):
                count = batch // 2 if varying and number == batches - 1 else batch
                images, labels = (part[:count].to(device) for part in pool[number % len(pool)])
                total += float(cross_entropy(model(images), labels))
        model.train()
        return total / batches

    for epoch in range(epochs):
        began = time.monotonic()
        # A user's loop keeps losses and reads them later; each must still be its own step's then.
        losses = [step(pool[number % len(pool)]) for number in range(steps)]
        kept = [float(loss) for loss in losses]
        yield row(f"epoch {epoch + 1}", began, kept[-1], steps) | {"different_losses": len(set(kept))}
        began = time.monotonic()
        yield row(f"evaluation {epoch + 1}", began, evaluate(), batches)


def _counting_captures() -> list[int]:
    """Return a list with the number of CUDA graphs recorded so far in this process, which keeps counting."""
    import torch

    count = [0]
    begin = torch.cuda.CUDAGraph.capture_begin

    def counted(graph: Any, *arguments: Any, **options: Any) -> None:
        count[0] += 1
        begin(graph, *arguments, **options)

    torch.cuda.CUDAGraph.capture_begin = counted  # type: ignore[method-assign, assignment]
    return count


if __name__ == "__main__":
    main()
