"""Two networks, two optimizers."""

import json

import torch
from torch import nn

generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
inside = {"generator": set(), "discriminator": set()}
generator[0].register_forward_hook(lambda m, i, o: inside["generator"].add(str(o.dtype)))
discriminator[0].register_forward_hook(lambda m, i, o: inside["discriminator"].add(str(o.dtype)))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
for _ in range(4):
    real, noise = torch.randn(16, 8), torch.randn(16, 4)
    of_discriminator.zero_grad()
    scores = discriminator(real), discriminator(generator(noise).detach())
    loss = nn.functional.softplus(-scores[0]).mean() + nn.functional.softplus(scores[1]).mean()
    loss.backward()
    of_discriminator.step()
    of_generator.zero_grad()
    nn.functional.softplus(-discriminator(generator(noise))).mean().backward()
    of_generator.step()
fused = [optimizer.param_groups[0]["fused"] for optimizer in (of_generator, of_discriminator)]
print(json.dumps({"fused": fused, **{name: sorted(seen) for name, seen in inside.items()}}))
