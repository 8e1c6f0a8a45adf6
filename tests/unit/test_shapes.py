"""What the probe sees of the shapes of images in a data set's batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.data import Dataset, default_collate

from autotune.base.layout import StudyFiles
from autotune.base.records import TrialResult, TrialStatus
from autotune.child.probe import LOOK_S, images_vary
from autotune.search import setup
from tests.support import FakeClock, make_probe, make_spec, make_study_spec

Make = Callable[[int], Any]


class Made(Dataset[Any]):
    """Samples made by a function of their index, each of which takes a while."""

    def __init__(self, make: Make, clock: FakeClock, *, each_s: float = 0.0) -> None:
        self.make, self.clock, self.each_s = make, clock, each_s
        self.read = 0

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        self.clock.sleep(self.each_s)
        return self.make(index)


def boxes(index: int) -> dict[str, torch.Tensor]:
    # Masks have the shape of their image, and are as many as there are boxes.
    count = index % 5
    return {"boxes": torch.zeros(count, 4), "masks": torch.zeros(count, 32, 48, dtype=torch.uint8)}


def of_any_size(index: int) -> torch.Tensor:
    return torch.zeros(3, 32 + index % 7, 48)


def listed(samples: list[Any]) -> Any:
    return [image for image, _ in samples], [target for _, target in samples]


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    height = max(s.shape[1] for s in samples)
    return torch.stack([torch.nn.functional.pad(s, (0, 0, 0, height - s.shape[1])) for s in samples])


def resized(samples: list[torch.Tensor]) -> torch.Tensor:
    """Another size for each batch, as in multi-scale training."""
    side = random.choice((32, 40, 48))
    return torch.nn.functional.interpolate(torch.stack(samples), size=(side, side))


@pytest.mark.parametrize(
    ("make", "collate", "vary"),
    [
        (lambda i: (torch.zeros(3, 32, 48), i), default_collate, False),
        (lambda i: (torch.zeros(3, 32, 48), boxes(i)), listed, False),
        # Crops of two sizes at fixed places, and a target in another resolution.
        (lambda i: ([torch.zeros(3, 64, 64), torch.zeros(3, 24, 24)], torch.zeros(1, 16, 16)), default_collate, False),
        (lambda i: (of_any_size(i), boxes(i)), listed, True),
        (of_any_size, padded, True),
        (lambda i: torch.zeros(3, 64, 64), resized, True),
        (lambda i: torch.zeros(1, 16, 24 + i % 3, 24), lambda samples: samples, True),
        (lambda i: (torch.zeros(7), i), default_collate, None),
        (lambda i: torch.zeros(1 + i % 3, 4), lambda samples: samples, None),
    ],
)
def test_images_of_varying_shapes_are_told_from_box_lists(make: Make, collate: Any, vary: bool | None) -> None:
    clock = FakeClock()
    assert images_vary(Made(make, clock), collate, batch_size=4, seed=0, clock=clock) is vary


def test_a_slow_store_is_looked_at_for_a_few_seconds_only() -> None:
    clock = FakeClock()
    samples = Made(lambda i: torch.zeros(3, 32, 32), clock, each_s=0.1)
    assert images_vary(samples, default_collate, batch_size=8, seed=0, clock=clock) is False
    assert samples.read * 0.1 == pytest.approx(LOOK_S, abs=0.21)
    slower = Made(lambda i: torch.zeros(3, 32, 32), clock, each_s=1.0)
    assert images_vary(slower, default_collate, batch_size=8, seed=0, clock=clock) is None


def test_a_resumed_study_keeps_what_its_first_look_saw(tmp_path: Path) -> None:
    files = StudyFiles(tmp_path)
    spec = make_spec(files.launch("probe-1").folder)

    def looked(images_vary: bool | None) -> Any:
        probe = make_probe(images_vary=images_vary)
        result = TrialResult(launch="probe-1", status=TrialStatus.COMPLETE, probe=probe, exit_code=0)

        def launch(name: str, **_: Any) -> TrialResult:
            files.launch(name).folder.mkdir(parents=True, exist_ok=True)
            files.launch(name).spec.write_text(spec.model_dump_json())
            files.launch(name).result.write_text(result.model_dump_json())
            return result

        run = SimpleNamespace(
            files=files,
            spec=make_study_spec(),
            required=(),
            launches=lambda _: SimpleNamespace(probe=launch),
            raise_if_stopped=lambda: None,
        )
        return setup._probe(cast(Any, run), "probe-1", cast(Any, None)).images_vary

    assert looked(None) is None
    assert looked(False) is False
    assert looked(True) is False
