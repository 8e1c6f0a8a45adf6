"""``train_on_a_full_disk.py SMALL PROFILE``: a training whose second checkpoint does not fit, and again with room."""

import contextlib
import io
import json
import sys
from pathlib import Path

from autotune.cli import main
from autotune.training.whole_training.checkpoints import Checkpoints

small, profile = map(Path, sys.argv[1:])
words = ["train", "--profile", str(profile), "--epochs", "3", "--arg", "width=20000", "--checkpoints", str(small)]
save = Checkpoints.save


def save_in_half_the_room(self, head, state):
    if len(self.files()) == 1:
        (small / "other").write_bytes(bytes(int(1.5 * self.files()[0].stat().st_size)))
    return save(self, head, state)


def train():
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()) as out:
        code = main.run([*words, "--json"])
    return {"code": code, "stderr": said.getvalue(), "stdout": out.getvalue()}


Checkpoints.save = save_in_half_the_room
print(json.dumps({**train(), "files": sorted(path.name for path in small.iterdir())}))
Checkpoints.save = save
(small / "other").unlink()
print(json.dumps(train()))
