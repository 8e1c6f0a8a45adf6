"""The contract of an export format, which every file in this catalog implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from autotune.base.errors import UsageError
from autotune.profile.export.by_hand import by_hand
from autotune.profile.export.heading import heading
from autotune.knobs import spell
from autotune.knobs.gradient_accumulation import parts_of
from autotune.profile import Profile, printable
from autotune.base.records import Config, Value
from autotune.space import samples_at_once

#: How the first line of every export begins that can have comments.
MARK = "autotune export"


@dataclass(frozen=True)
class Given:
    """What decides, besides a knob's value, how a tool expresses it.

    Attributes:
        cuda: the profile was measured on a CUDA device.
        model: name of the workload.
        start_method: how loader workers were started.
        ranks: processes that train together.
    """

    config: Config
    cuda: bool
    model: str = ""
    start_method: str = "fork"
    ranks: int = 1

    @property
    def batch_size(self) -> int:
        """Samples of an optimizer's step."""
        return int(self.config["batch_size"])

    @property
    def parts(self) -> int:
        """Parts of a batch whose gradients are accumulated."""
        return parts_of(self.config)

    @property
    def at_once(self) -> int:
        """Samples that go through the model at once: what most tools call the batch size.

        Raises:
            UsageError: the batch does not divide into its parts.
        """
        if self.batch_size % self.parts:
            raise UsageError(
                f"a batch of {self.batch_size} does not divide into {self.parts} equal parts",
                advice="the profile was altered; export the study again.",
            )
        return samples_at_once(self.config)


def given_by(profile: Profile) -> Given:
    """Return what a profile gives to a format."""
    cuda = profile.conditions.device.startswith("cuda")
    conditions = profile.conditions
    return Given(
        profile.configuration, cuda, profile.workload.name, conditions.worker_start_method, ranks=conditions.ranks
    )


@dataclass(frozen=True)
class Told:
    """How a tool is told a knob's value.

    Attributes:
        options: options of the tool, with dots between sections and names. Empty if the tool does it by itself.
        lack: what the tool can't be told, as a clause that says what the user does about it.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    lack: str | None = None


#: Returns how a tool is told a value. Raises `UsageError` if the tool would silently do something else with it.
Expression = Callable[[Value, Given], Told]


@dataclass(frozen=True)
class Exported:
    """An export: its text, and what is to be said on stderr because the text has no comments."""

    text: str
    notes: tuple[str, ...] = ()


class Format:
    """A format of `autotune export`.

    Each file of the catalog subclasses this or `ToolFormat`, and creates one instance called ``FORMAT``. The file's
    docstring becomes its section in ``docs/exports.md``. This class itself carries every knob's value as it is.

    Attributes:
        name: the name in ``--format``, and of the file.
        about: what it is for, a few words.
        usage: how it is used, one line; ``FILE`` stands for what was exported.
        place: position in lists, ascending.
        endings: of files that can be nothing else.
        takes_maps: ``--map`` says by which words it sets knobs.
        flat: comments cannot be in it, because a shell or a tool reads it whole. They are notes then.
    """

    name: str
    about: str
    usage: str
    place: int = 1000
    endings: tuple[str, ...] = ()
    takes_maps: bool = False
    flat: bool = False

    def told(self, name: str, value: Value, given: Given) -> Told:
        """Return how a knob's value is expressed.

        Raises:
            UsageError: the tool would silently do something else.
        """
        return Told()

    def export(self, profile: Profile, maps: Mapping[str, str] = MappingProxyType({})) -> Exported:
        """Return a profile in this format.

        Args:
            maps: words by ``KNOB`` or ``KNOB:VALUE``, as ``--map`` takes them.

        Raises:
            UsageError: the result would be wrong.
        """
        raise NotImplementedError

    def is_earlier(self, text: str) -> bool:
        """Return whether a text is an earlier export in this format, which may be overwritten."""
        return text.startswith(f"# {MARK}: {self.name},")


class ToolFormat(Format):
    """A format with the options of a tool.

    Attributes:
        knobs: the knobs that the tool can be told. The export names all others, also those that are added later.
        start: what starts the processes of a training of several ``{ranks}`` with the tool.
    """

    knobs: Mapping[str, Expression]
    start: str = "torchrun --nproc-per-node={ranks}"

    def caution(self, given: Given) -> str:
        """Return what its users have to know in any case, one sentence a line."""
        return ""

    def always(self, given: Given) -> dict[str, Any]:
        """Return options that do not depend on a knob, or that stand for knobs that the configuration does not have."""
        return {}

    def render(self, options: Mapping[str, Any], given: Given) -> str:
        """Return the text for options, with dots between sections and names."""
        raise NotImplementedError

    def told(self, name: str, value: Value, given: Given) -> Told:
        known = self.knobs.get(name)
        return Told(lack=by_hand(name, value, cuda=given.cuda)) if known is None else known(value, given)

    def export(self, profile: Profile, maps: Mapping[str, str] = MappingProxyType({})) -> Exported:
        given = given_by(profile)
        options, lacks = self.always(given), []
        for name, value in given.config.items():
            told = self.told(name, value, given)
            options |= told.options
            if told.lack is not None:
                lacks.append(f"{printable(f'{name}={spell(value)}')}: {printable(told.lack)}")
        notes = [*heading(profile, self.start), *self.caution(given).splitlines()]
        notes += ["Not expressed here:", *(f"  {lack}" for lack in lacks)] if lacks else ["All knobs are expressed."]
        body = self.render(options, given)
        if self.flat:
            return Exported(body, tuple(notes))
        lines = [f"{MARK}: {self.name}, for {self.about}", *notes, f"Use it: {self.usage}"]
        return Exported("".join(f"# {line}".rstrip() + "\n" for line in lines) + body)


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with dots in their names as sections in sections."""
    root: dict[str, Any] = {}
    for name, value in options.items():
        *sections, last = name.split(".")
        place = root
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return root
