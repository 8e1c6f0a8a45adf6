"""The door of the models in somebody else's script: what is switched between steps, and what is not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from autotune.launcher import script_entry

CODE = f"""
import json, sys
sys.path.insert(0, {str(script_entry.FOLDER)!r})
import torch
from autotune_agent import models

recording = False
models.is_capturing = lambda: recording
net, images = torch.nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)

def layout():
    return "channels_last" if net.weight.is_contiguous(memory_format=torch.channels_last) else "contiguous"

door = models.ModelDoor([], lambda: True, to_switch=True)
door.install()
seen = []
net(images).sum().backward()
door.switch({{"memory_format": "channels_last"}})
seen.append(layout())
door.switch({{}})
seen.append(layout())
recording = True
net(images)
recording = False
try:
    door.switch({{"memory_format": "channels_last"}})
except RuntimeError as error:
    seen.append(str(error))
door.switch({{}})
print(json.dumps([*seen, layout()]))
"""


@pytest.mark.slow
def test_weights_whose_place_a_cuda_graph_has_recorded_are_not_laid_out_anew() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=120)
    first, then, why, last = json.loads(done.stdout)
    assert (first, then, last) == ("channels_last", "contiguous", "contiguous")
    assert why == "a CUDA graph of the script's reads its weights where they are"
