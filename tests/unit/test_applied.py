"""A profile applied to a reader's own training, and what is said where it was measured elsewhere."""

from __future__ import annotations

import contextlib
import difflib
import io
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autotune
from autotune import profile as profiles
from autotune.base.errors import ProfileError, UsageError
from autotune.knobs import KNOBS
from autotune.machine.host import read_host, torch_versions
from tests.support import make_profile

PLAIN, TUNED = (Path(__file__).with_name(f"readers_training{name}.py") for name in ("", "_with_profile"))
#: Where the reader's training is today.
OWN = {"precision": "fp32", "compile_mode": "off", "batch_size": 32, "memory_format": "contiguous"}
OWN |= {"optimizer_impl": "for-loop"}


def write(folder: Path, config: dict[str, Any], **fingerprint: Any) -> Path:
    host = read_host()
    here = {"cores": host.cores, "cpu_model": host.cpu_model, "torch": torch_versions()[0], **fingerprint}
    path = folder / "profile.yaml"
    profiles.write(make_profile(configuration=config, fingerprint={"values": here}), path)
    return path


def losses(script: Path, *words: str) -> list[float]:
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [str(script), *words])
        runpy.run_path(str(script), run_name="__main__")
    return [float.fromhex(line) for line in printed.getvalue().splitlines()]


class TestAReadersTraining:
    def test_takes_the_profile_with_four_lines(self) -> None:
        before, after = PLAIN.read_text().splitlines(), TUNED.read_text().splitlines()
        assert 55 <= len(before) <= 65
        changes = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
        written = [line[1:].strip() for line in changes if line[0] == "+" and line.strip() != "+"]
        gone = [line[1:].strip() for line in changes if line[0] == "-"]
        assert len(written) == 4 and written[0] == "import autotune"
        # What the step does, and the loader.
        away = [
            "loader = data.DataLoader",
            "optimizer.zero_grad",
            "loss = compute_loss",
            "loss.backward",
            "optimizer.step",
        ]
        assert [line.split("(")[0] for line in gone] == away

    @pytest.mark.slow
    @pytest.mark.parametrize("workers", [0, 2])
    def test_trains_as_before_with_the_settings_of_before(
        self, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path, {**OWN, "num_workers": workers})
        monkeypatch.chdir(tmp_path)
        plain = losses(PLAIN, "--workers", str(workers))
        assert len(plain) == 2 and losses(TUNED, "--workers", str(workers)) == plain

    def test_is_prepared_as_a_trial_is(self, tmp_path: Path) -> None:
        """Every setting of the profile arrives, the hooks are called, and the workers start before the model moves."""
        config = {**OWN, "batch_size": 4, "num_workers": 1, "memory_format": "channels_last", "precision": "bf16"}
        config |= {"persistent_workers": True, "prefetch_factor": 2}
        profile = autotune.load_profile(write(tmp_path, {**config, "optimizer_impl": "fused", "intra_op_threads": 1}))
        order: list[str] = []

        class Net(nn.Conv2d):
            def to(self, *args: Any, **kwargs: Any) -> Any:
                order.append("the model moves")
                return super().to(*args, **kwargs)

        class InOrder(torch.utils.data.SequentialSampler):
            def __iter__(self) -> Any:
                order.append("the workers start")
                return super().__iter__()

        def collate(samples: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack(samples)

        images = [torch.ones(3, 8, 8) * index for index in range(8)]
        threads = torch.get_num_threads()
        with profile.process():
            loader, step = profile.prepare(
                Net(3, 2, 3),
                lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
                images,
                lambda model, batch: model(batch).square().mean(),
                after_backward=lambda model: order.append("after backward"),
                after_step=lambda model: order.append("after step"),
                sampler=InOrder(images),
                collate_fn=collate,
            )
            assert torch.get_num_threads() == 1
            for _ in range(2):
                batches = list(loader)
                assert [len(batch) for batch in batches] == [4, 4]
                assert sorted(batches[1][:, 0, 0, 0].tolist()) == [4, 5, 6, 7]
            assert torch.isfinite(step(batches[0]))
        assert torch.get_num_threads() == threads
        assert order[:2] == ["the workers start", "the model moves"] and order.count("the workers start") == 2
        assert order[-2:] == ["after backward", "after step"]
        assert step.optimizer.param_groups[0]["fused"] is True
        assert KNOBS["memory_format"].is_in_force(step.model, step.optimizer, "channels_last")

    def test_what_the_user_says_of_a_loader_rules_out_what_the_profile_says(self, tmp_path: Path) -> None:
        profile = autotune.load_profile(
            write(tmp_path, {"batch_size": 4, "num_workers": 1, "prefetch_factor": 2, "persistent_workers": True})
        )
        images = [torch.ones(2) * index for index in range(8)]
        batches = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(images), 2, drop_last=False)  # type: ignore[arg-type]
        assert [len(batch) for batch in profile.loader(images, num_workers=0)] == [4, 4]  # type: ignore[arg-type]
        assert [len(batch) for batch in profile.loader(images, batch_sampler=batches)] == [2] * 4  # type: ignore[arg-type]

    def test_a_rank_is_on_its_card_before_the_workers_start(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With them begins the thread that pins memory."""
        order: list[str] = []

        class Stop(Exception):
            pass

        class InOrder(torch.utils.data.SequentialSampler):
            def __iter__(self) -> Any:
                order.append("the workers start")
                raise Stop

        profile = autotune.load_profile(write(tmp_path, {**OWN, "num_workers": 1}), device="cuda:1")
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: order.append(str(device)))
        model, images = nn.Linear(2, 2), [torch.ones(2)] * 64
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(Stop):
            profile.prepare(model, optimizer, images, lambda model, batch: model(batch).sum(), sampler=InOrder(images))
        assert order == ["cuda:1", "the workers start"]

    def test_what_is_given_in_the_wrong_place_is_one_sentence(self, tmp_path: Path) -> None:
        profile = autotune.load_profile(write(tmp_path, {"batch_size": 4}))
        model, images = nn.Linear(2, 2), [torch.ones(2)] * 64
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        own: Any = torch.utils.data.DataLoader(images, batch_size=8)  # type: ignore[arg-type]

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(model(batch).sum())

        wrong: list[tuple[Any, str]] = [
            (lambda: profile.prepare(optimizer, model, images, loss), "the first argument is the model, and got SGD"),  # type: ignore[arg-type]
            (lambda: profile.prepare(model, optimizer, own, loss), "of a data set, and got DataLoader"),
            (lambda: profile.loader(own), "of a data set, and got DataLoader"),
            (lambda: profile.step(model, optimizer, nn.MSELoss()), "MSELoss takes outputs and targets"),
        ]
        for call, message in wrong:
            with pytest.raises(UsageError, match=message) as caught:
                call()
            assert caught.value.__notes__


class TestAnotherMachine:
    def said(self, path: Path, **options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            autotune.load_profile(path, **options)
        assert all(w.filename == __file__ for w in caught)
        return [str(w.message) for w in caught]

    def test_the_same_machine_is_no_news(self, tmp_path: Path) -> None:
        """Neither is what concerns only cards, nor a file of the workload that is not here."""
        path = write(tmp_path, OWN, gpu_model=None, driver=None, cuda="12.1", cudnn=None, workload_sha256="0" * 64)
        moved = path.read_text().replace('name: "resnet50"', 'name: "mine"')
        path.write_text(moved)
        assert self.said(path) == [] == self.said(path, strict=True)

    def test_a_file_from_elsewhere_warns_or_is_refused(self, tmp_path: Path) -> None:
        path = write(tmp_path, OWN, cores=999, torch="2.0.0")
        (software, host) = self.said(path)
        assert software.startswith(f"{path}: the software differs (torch 2.0.0, here ")
        assert "the host differs (cores 999, here" in host
        with pytest.raises(ProfileError, match=r"does not hold here: .*torch 2.0.0, here .*cores 999, here"):
            autotune.load_profile(path, strict=True)
