"""A plain PyTorch training of ResNet-50 as one would write it by hand, to compare autotune with.

    python benchmarks/plain_loop.py FOLDER IMAGE_SIZE BATCH STEPS [OPTIONS]

FOLDER is an ImageFolder, or ``synthetic`` for one random image in memory. Prints samples per second over STEPS steps,
after three warm-up steps (``--warm-up``). Does not use autotune.
"""

import argparse
import contextlib
import time

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18, resnet50
from torchvision.transforms import v2

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("size", type=int)
parser.add_argument("batch_size", type=int)
parser.add_argument("steps", type=int)
parser.add_argument("--device", default="cpu")
parser.add_argument("--model", default="resnet50", choices=["resnet18", "resnet50"])
parser.add_argument("--precision", default="fp32", choices=["fp32", "tf32", "bf16", "fp16"])
parser.add_argument("--compile", default="off", help="a mode of torch.compile")
parser.add_argument("--channels-last", action="store_true")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--prefetch", type=int, default=2)
parser.add_argument("--persistent", action="store_true")
parser.add_argument("--pin", action="store_true")
parser.add_argument("--cudnn-benchmark", action="store_true")
parser.add_argument("--optimizer", default=None, choices=["for-loop", "foreach", "fused"])
parser.add_argument("--warm-up", type=int, default=3)
options = parser.parse_args()


class SameImage(Dataset):  # type: ignore[type-arg]
    image = torch.randn(3, options.size, options.size)

    def __len__(self) -> int:
        return 1_281_167

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.image, index % 1000


if options.folder == "synthetic":
    dataset: Dataset = SameImage()  # type: ignore[type-arg]
else:
    normalize = v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    crop = [v2.PILToTensor(), v2.RandomResizedCrop(options.size, antialias=True), v2.RandomHorizontalFlip()]
    transform = v2.Compose([*crop, v2.ToDtype(torch.float32, scale=True), normalize])
    dataset = ImageFolder(options.folder, transform)
working = {"prefetch_factor": options.prefetch, "persistent_workers": options.persistent} if options.workers else {}
loader = DataLoader(
    dataset,
    batch_size=options.batch_size,
    shuffle=True,
    drop_last=True,
    num_workers=options.workers,
    pin_memory=options.pin,
    **working,
)
device = torch.device(options.device)
on_card = device.type == "cuda"
torch.backends.cudnn.benchmark = options.cudnn_benchmark
if options.precision == "tf32":
    torch.set_float32_matmul_precision("high")
layout = torch.channels_last if options.channels_last else torch.contiguous_format
model = (resnet50 if options.model == "resnet50" else resnet18)(weights=None).train().to(device, memory_format=layout)
if options.compile != "off":
    model.compile(mode=options.compile)
chosen = {None: {}, "for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
optimizer = torch.optim.SGD(
    model.parameters(),
    lr=0.1 * options.batch_size / 256,
    momentum=0.9,
    weight_decay=1e-4,
    **chosen[options.optimizer],
)
scaler = torch.amp.GradScaler(device.type, enabled=options.precision == "fp16")
dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)
began = time.monotonic()
for number, (images, labels) in enumerate(loader):
    if number == options.warm_up:
        if on_card:
            torch.cuda.synchronize()
        began = time.monotonic()
    images = images.to(device, non_blocking=options.pin, memory_format=layout)  # noqa: PLW2901
    labels = labels.to(device, non_blocking=options.pin)  # noqa: PLW2901
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device.type, dtype=dtype) if dtype else contextlib.nullcontext():
        loss = cross_entropy(model(images), labels, label_smoothing=0.1)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if number == options.warm_up + options.steps - 1:
        break
if on_card:
    torch.cuda.synchronize()
print(options.batch_size * (number + 1 - options.warm_up) / (time.monotonic() - began))
