"""A plain PyTorch training of ResNet-50 as one would write it by hand, to compare autotune's baseline with.

    python benchmarks/plain_loop.py FOLDER IMAGE_SIZE BATCH STEPS

Prints samples per second over STEPS steps, after three warm-up steps. Does not use autotune.
"""

import sys
import time

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.models import resnet50
from torchvision.transforms import v2

folder = sys.argv[1]
size, batch_size, steps = (int(a) for a in sys.argv[2:5])
normalize = v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
crop = [v2.PILToTensor(), v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
dataset = ImageFolder(folder, v2.Compose([*crop, v2.ToDtype(torch.float32, scale=True), normalize]))
loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)
model = resnet50(weights=None).train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * batch_size / 256, momentum=0.9, weight_decay=1e-4)
for number, (images, labels) in enumerate(loader):
    if number == 3:
        began = time.monotonic()
    optimizer.zero_grad(set_to_none=True)
    loss = cross_entropy(model(images), labels, label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    if number == 3 + steps - 1:
        break
print(batch_size * (number - 2) / (time.monotonic() - began))
