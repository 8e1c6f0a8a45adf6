"""The file of ``autotune submit matrix.yaml``: models × targets × batch sizes, each cell a search.

    defaults: {data: /data/images, studies-dir: /shared/studies}
    models:
      - resnet50
      - {model: mine.py, arg: {depth: 4}, budget: 1h}
    targets:
      here: {}
      a100: {to: slurm, partition: gpu, gres: "gpu:a100:1", time: 2h}
    batches: [64, 128]

Options are those of ``autotune submit``. What a target says wins over what its model says, and that over the defaults.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from autotune.cli.job_file import YAML_BYTES, flag, option_words
from autotune.cli.submit_slurm import QUEUES
from autotune.base.errors import AutotuneError, ProfileError, UnknownNameError, UsageError
from autotune.base.files import read_regular
from autotune.space.formatting import model_name
from autotune.profile import plain_data
from autotune.profile.schema import shown

_KEYS = ("defaults", "models", "targets", "batches")
_AGAIN = "see the example in the documentation of clusters."
#: A target's name is a part of a study's.
_TARGET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
#: Options that name one job, or that a cell has by its place.
_OURS = {
    "study": "the study of a cell is named by its content",
    "keep_batch_size": "write `batches`, which are kept",
    "dry_run": "it concerns the whole matrix",
    "again": "it concerns the whole matrix",
    "file": "a matrix holds no file of jobs",
    "state_dir": "it concerns the whole matrix",
    "json": "it concerns the whole matrix",
}
#: What is said of a model only if nothing else tells it from others.
_APART = ("model", "script", "data", "budget")
#: What only a target has.
_TARGETS = ("to", "hardware")
Place = tuple[str | int, ...]
#: By name: where each is in the file, and its value.
Options = dict[str, tuple[Place, Any]]


@dataclass(frozen=True)
class Cell:
    """One search of a matrix.

    Attributes:
        number: of the model in the list. model, target: as the file calls them.
        more: what the model says of itself, as text, but what is often all its own: its file, data and budget, which
            are in further.
        batch: the batch size that is kept; ``None`` if it is searched.
        to: whose queue; ``None`` if the target does not say. hardware: a part of the name of the target's GPU or CPU,
            if it says.
        words: of its command line, after ``autotune submit``.
        line: of its model in the file. lines: by flag, those of its options, and of the keys and values in them.
    """

    number: int
    model: str
    more: str
    further: str
    target: str
    batch: int | None
    to: str | None
    hardware: str | None
    words: tuple[str, ...]
    line: int
    lines: Mapping[str, tuple[int, Mapping[str, int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Matrix:
    """The cells of a file, by model, then batch, then target."""

    path: Path
    targets: tuple[str, ...]
    cells: tuple[Cell, ...]

    def at_fault(self, cell: Cell, message: str, typed: Sequence[str] = ()) -> str:
        """Return where an error comes from, as a prefix of its message: by the flags in it, and by what it quotes.

        Args:
            typed: words of options on the command line, which may be what is wrong.
        """
        flags, quoted = set(re.findall(r"--[a-z][a-z-]*", message)), set(re.findall(r"'([^']*)'", message))
        there = {part for word in typed for part in (word, *_parts(word))}
        named = [cell.lines[one] for one in cell.lines if one in flags]
        if flags & there and not named:
            return "the command line"
        # A message may also call a knob by its bare name.
        for words in (quoted, set(re.findall(r"[a-z]+(?:_[a-z]+)+", message))):
            for _, texts in named or cell.lines.values():
                for text in texts:
                    if text in words:
                        return f"{self.path}, line {texts[text]}"
        if named:
            return f"{self.path}, line {named[0][0]}"
        return "the command line" if quoted & there else f"{self.path}, line {cell.line}"


def read_matrix(path: Path, known: Collection[str], repeatable: Collection[str]) -> Matrix:
    """Read a matrix.

    Args:
        known: the options of a job, as they are typed. repeatable: those that can have several values.

    Raises:
        UsageError: it cannot be read, or does not have this form; the message names the line.
    """
    try:
        text = read_regular(path, YAML_BYTES, follow=True).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    try:
        data = plain_data(text, str(path), kind="matrix", again=_AGAIN)
    except ProfileError as error:
        raise UsageError(str(error), advice=error.advice, detail=error.detail) from None
    node = YAML(typ="safe", pure=True).compose(text)
    lines = dict(_places(node)) if node is not None else {}
    return _Reading(path, lines, known, repeatable).matrix(data)


def _places(node: Node, at: Place = ()) -> Iterator[tuple[Place, int]]:
    """Yield the line of every key and item."""
    if isinstance(node, MappingNode):
        for key, value in node.value:
            yield (*at, key.value), key.start_mark.line + 1
            yield from _places(value, (*at, key.value))
    elif isinstance(node, SequenceNode):
        for i, value in enumerate(node.value):
            yield (*at, i), value.start_mark.line + 1
            yield from _places(value, (*at, i))


class _Reading:
    """Reads one file, whose lines are known by their places in it."""

    def __init__(
        self, path: Path, lines: Mapping[Place, int], known: Collection[str], repeatable: Collection[str]
    ) -> None:
        self._path = path
        self._lines = lines
        self._known = known
        self._repeatable = repeatable

    def matrix(self, data: Any) -> Matrix:
        if isinstance(data, dict) and "jobs" in data:
            raise UsageError(
                f"{self._path} is a list of jobs, not a matrix", advice=f"write `autotune submit --file {self._path}`."
            )
        if not isinstance(data, dict) or not all(data.get(name) for name in ("models", "targets")):
            raise UsageError(f"{self._path} is no matrix: it needs models and targets", advice=_AGAIN)
        for name in data:
            if name not in _KEYS:
                self._refuse((name,), UnknownNameError("key", str(name)[:60], _KEYS))
        defaults = self._options(data.get("defaults") or {}, ("defaults",), self._known)
        batches = self._batches(data.get("batches"))
        models, targets = self._models(data["models"]), self._targets(data["targets"])
        cells = []
        for place, model in models:
            for batch in batches:
                for target, options in targets.items():
                    given = {**defaults, **model, **options}
                    cells.append(self._cell(given, model, place, target, batch))
        return Matrix(self._path, tuple(targets), tuple(cells))

    def _cell(self, given: Options, model: Options, at: Place, target: str, batch: int | None) -> Cell:
        if batch is not None and "batch_size" in given:
            self._refuse(given["batch_size"][0], "batch-size stands beside batches, which say the same")
        words: list[str] = []
        for name, (place, value) in given.items():
            if name not in _TARGETS:
                try:
                    words += option_words(name, value, self._repeatable)
                except UsageError as error:
                    self._refuse(place, error)
        if batch is not None:
            words += [flag("batch_size"), str(batch), flag("keep_batch_size")]
        said = {name: value for name, (_, value) in given.items()}
        return Cell(
            number=int(at[1]),
            model=str(said.get("model") or Path(str(said["script"])).name.split(".")[0]),
            more=", ".join(_said(name, value) for name, (_, value) in model.items() if name not in _APART),
            further=", ".join(
                _said(name, value)
                for name, (_, value) in model.items()
                if name in _APART and (name != "model" or value != model_name(str(value)))
            ),
            target=target,
            batch=batch,
            to=said.get("to"),
            hardware=said.get("hardware"),
            words=tuple(words),
            line=self._line(at),
            lines={
                flag(name): (self._line(place), {text: self._line(at) for text, at in _texts(value, place)})
                for name, (place, value) in given.items()
            },
        )

    def _models(self, data: Any) -> list[tuple[Place, Options]]:
        if not isinstance(data, list):
            self._refuse(("models",), "models must be a list", advice="write `- resnet50`, a line for each.")
        found: list[tuple[Place, Options]] = []
        for i, item in enumerate(data):
            at: Place = ("models", i)
            options = self._options({"model": item} if isinstance(item, str) else item, at, self._known)
            if not options.get("model", (at, None))[1] and not options.get("script", (at, None))[1]:
                self._refuse(at, "a model has a name", advice="write `- resnet50` or `- {model: mine.py, …}`.")
            found.append((at, options))
        return found

    def _targets(self, data: Any) -> dict[str, Options]:
        if not isinstance(data, dict):
            self._refuse(("targets",), "targets must have names", advice="write `here: {}`, a line for each.")
        found = {}
        for name, options in data.items():
            at = ("targets", name)
            if not isinstance(name, str) or not _TARGET.fullmatch(name):
                self._refuse(at, f"{shown(name)} cannot name a target", advice="use letters, digits, dots and dashes.")
            found[name] = self._options(options or {}, at, [*self._known, *map(flag, _TARGETS)])
            for one in _TARGETS:
                place, value = found[name].get(one, (at, ""))
                if not isinstance(value, str):
                    self._refuse(place, f"{one} must be text, not {shown(value)}")
            place, queue = found[name].get("to", (at, QUEUES[0]))
            if queue not in QUEUES:
                self._refuse(place, UnknownNameError("queue", queue, QUEUES))
        return found

    def _batches(self, data: Any) -> Sequence[int | None]:
        if data is None:
            return [None]
        if not isinstance(data, list) or not data:
            self._refuse(("batches",), "batches must be a list of batch sizes")
        for i, one in enumerate(data):
            if type(one) is not int or one < 1:
                self._refuse(("batches", i), f"a batch size is a whole number above zero, not {shown(one)}")
        return list(dict.fromkeys(data))

    def _options(self, data: Any, at: Place, known: Collection[str]) -> Options:
        if not isinstance(data, dict):
            self._refuse(at, f"{shown(at[-1], quoted=False)} must be options with their values, not {shown(data)}")
        found: Options = {}
        for name, value in data.items():
            option = str(name).replace("-", "_")
            # A model that is only a name has no place of its own for it.
            place = (*at, name) if (*at, name) in self._lines else at
            if option in _OURS:
                self._refuse(place, f"{shown(name, quoted=False)} cannot stand in a matrix: {_OURS[option]}")
            if flag(option) not in known:
                self._refuse(
                    place, UnknownNameError("option", str(name)[:60], [one.removeprefix("--") for one in known])
                )
            found[option] = (place, value)
        return found

    def _line(self, place: Place) -> int:
        while place and place not in self._lines:
            place = place[:-1]
        return self._lines.get(place, 1)

    def _refuse(self, place: Place, why: str | AutotuneError, advice: str | None = None) -> NoReturn:
        told = advice or (why.advice if isinstance(why, AutotuneError) else None)
        raise UsageError(f"{self._path}, line {self._line(place)}: {why}", advice=told)


def _texts(value: Any, at: Place) -> Iterator[tuple[str, Place]]:
    """Yield the keys and values of an option, and their parts, with their places."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield str(key), (*at, key)
            yield from _texts(one, (*at, key))
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield from _texts(one, (*at, i))
    else:
        yield from ((text, at) for text in (str(value), *_parts(str(value))))


def _parts(text: str) -> list[str]:
    """Return what stands on both sides of the signs in ``NAME=VALUE`` or ``FIGURE<=VALUE``."""
    return [part for part in re.split(r"[=<>,:]+", text) if part]


def _said(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={one}" for key, one in value.items())
    return name if value is True else f"{name}={value}"
