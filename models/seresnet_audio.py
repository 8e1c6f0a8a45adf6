"""A squeeze-and-excitation ResNet that tells spoofed speech from a person's: sound files become spectrograms in the
loader.

Stresses the loader: decoding a file and computing its spectrogram takes a core longer than the network takes on a
GPU, and the images are large and of one channel.

Model: He et al. 2015 (arXiv:1512.03385), blocks of two, with Hu et al. 2017 (arXiv:1709.01507, reduction 16); for
spoofed speech: Lai et al. 2019 (arXiv:1904.01120). Log-mel spectrograms: 25 ms Hann windows every 10 ms, 80 bands
(O'Shaughnessy 1987: mel = 2595 log10(1 + Hz / 700)). `--data DIR` reads WAV files of 16 bits in `DIR/bonafide` and
`DIR/spoof`; without it, 10,000 sounds are cut from a few generated ones, which are kept as WAV files in memory.
"""

import io
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from autotune import Context

BATCH_SIZE = 32
ARGS = {"seconds": "4"}

RATE = 16_000  # samples per second
WINDOW, HOP, BANDS = 400, 160, 80
SOUNDS, FILES = 10_000, 64

Sample = tuple[torch.Tensor, int]  # log-mel spectrogram (1, BANDS, T) float32, 0 for a person's and 1 for spoofed
Batch = tuple[torch.Tensor, torch.Tensor]
#: Sounds that the metric looks at.
HELD_OUT = 128


def filters() -> torch.Tensor:
    """Triangles over the bins of the spectrum, (BANDS, WINDOW // 2 + 1), evenly spaced in mel."""
    top = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, BANDS + 2) / 2595) - 1)
    bins = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    return torch.from_numpy(np.minimum(rising, falling).clip(0).astype(np.float32))


def decoded(source: Any, name: str) -> torch.Tensor:
    """Read a WAV file: its first channel, float32 in -1…1."""
    try:
        with wave.open(source) as file:
            if file.getsampwidth() != 2 or file.getframerate() != RATE:
                raise ValueError(f"it has {8 * file.getsampwidth()} bits at {file.getframerate()} Hz")
            channels = file.getnchannels()
            sound = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")[::channels]
    except (wave.Error, EOFError, ValueError) as error:
        what = f"{name} is no WAV file of 16 bits at {RATE} Hz ({error})"
        raise ValueError(f"{what}; take it out of the data set") from error
    return torch.from_numpy(sound.astype(np.float32) / 2**15)


def spoken(rng: np.random.Generator, seconds: float, *, spoof: bool) -> bytes:
    """Make a sound with the rhythm and the harmonics of speech as a WAV file; a spoofed one lacks the small
    irregularities of a voice."""
    times = np.arange(int(seconds * RATE)) / RATE
    drift = 0 if spoof else np.cumsum(rng.normal(0, 0.3, times.size)) * 2 * np.pi / RATE
    pitch = 2 * np.pi * rng.uniform(90, 240) * times + drift
    voice = sum(np.sin(number * pitch) / number for number in range(1, 12))
    syllables = np.clip(np.sin(2 * np.pi * rng.uniform(2, 5) * times + rng.uniform(0, 6)), 0, 1)
    sound = 0.25 * voice * syllables + rng.normal(0, 0.01, times.size)
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(sound, -1, 1) * (2**15 - 1)).astype("<i2").tobytes())
    return stream.getvalue()


class Spectrograms(Dataset[Sample]):
    """Random cuts of sound files as spectrograms.

    Args:
        sources: of each file: where it is, or what it holds; and its label.
        count: samples of an epoch.
    """

    def __init__(self, sources: list[tuple[Path | bytes, int]], count: int, seconds: float) -> None:
        self.sources = sources
        self.count = count
        self.length = int(seconds * RATE)
        self.filters, self.window = filters(), torch.hann_window(WINDOW)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        source, label = self.sources[index % len(self.sources)]
        if isinstance(source, Path):
            sound = decoded(str(source), str(source))
        else:
            sound = decoded(io.BytesIO(source), "a sound")
        if len(sound) < self.length:
            sound = sound.repeat(-(-self.length // max(1, len(sound))))
        start = int(torch.randint(len(sound) - self.length + 1, ()))
        spectrum = torch.stft(sound[start : start + self.length], WINDOW, HOP, window=self.window, return_complex=True)
        bands = self.filters @ spectrum.abs().square()
        return (bands + 1e-6).log()[None], label


class Squeeze(nn.Module):
    """Weighs channels by what all places together say."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = max(4, channels // 16)
        self.weigh = nn.Sequential(nn.Linear(channels, inner), nn.ReLU(), nn.Linear(inner, channels), nn.Sigmoid())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = images * self.weigh(images.mean(dim=(2, 3)))[:, :, None, None]
        return found


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
            Squeeze(outputs),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.body(images) + self.shortcut(images))


def model(ctx: Context) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    widths, counts = (16, 32, 64, 128), (3, 4, 6, 3)
    inputs = widths[0]
    for width, count in zip(widths, counts, strict=True):
        for number in range(count):
            layers.append(Residual(inputs, width, 2 if number == 0 and width > widths[0] else 1))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 2))


def dataset(ctx: Context) -> Dataset[Any]:
    seconds = float(ctx.arg("seconds"))
    if ctx.data.kind == "folder":
        folder = Path(str(ctx.data.path))
        names = enumerate(("bonafide", "spoof"))
        found = [(path, label) for label, name in names for path in sorted((folder / name).rglob("*.wav"))]
        if len({label for _, label in found}) < 2:
            raise FileNotFoundError(f"{folder} has no folders bonafide and spoof, each with WAV files")
        return Spectrograms(list(found), len(found), seconds)
    rng = np.random.default_rng(ctx.seed)
    made: list[tuple[Path | bytes, int]] = [
        (spoken(rng, 1.5 * seconds, spoof=bool(number % 2)), number % 2) for number in range(FILES)
    ]
    return Spectrograms(made, SOUNDS, seconds)


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=3e-4 * ctx.batch_size / 32, weight_decay=1e-4)


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    spectrograms, labels = batch
    return nn.functional.cross_entropy(model(spectrograms), labels)


def metric(ctx: Context, model: nn.Module) -> float:
    """Equal error rate, 0 to 1: where as many spoofed sounds pass as persons' are refused. Of a user's own files, those
    that are trained on: whether it comes out as in fp32 is what matters here."""
    sounds = dataset(replace(ctx, seed=ctx.seed + 1))
    assert isinstance(sounds, Spectrograms)
    kinds = [[i for i, (_, label) in enumerate(sounds.sources) if label == kind] for kind in (0, 1)]
    scores, labels = [], []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(ctx.seed)
        for first in range(0, HELD_OUT, ctx.batch_size):
            part = range(first, min(HELD_OUT, first + ctx.batch_size))
            batch = [sounds[kinds[i % 2][i // 2 % len(kinds[i % 2])]] for i in part]
            outputs = model(torch.stack([spectrogram for spectrogram, _ in batch]).to(ctx.device)).float()
            scores += (outputs[:, 1] - outputs[:, 0]).tolist()
            labels += [label for _, label in batch]
    return equal_error_rate(np.array(scores), np.array(labels))


def equal_error_rate(scores: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
    """Return the mean of both error rates at the threshold where they are closest.

    Args:
        scores: (N,), higher for what seems spoofed. labels: (N,), 1 for what is.
    """
    thresholds = np.append(np.unique(scores), np.inf)
    missed = (scores[labels == 1] < thresholds[:, None]).mean(axis=1)
    refused = (scores[labels == 0] >= thresholds[:, None]).mean(axis=1)
    closest = np.abs(missed - refused).argmin()
    return float(missed[closest] + refused[closest]) / 2
