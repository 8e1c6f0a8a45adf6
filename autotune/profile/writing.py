"""Writes a profile as text: YAML with comments for people."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from autotune.workload.catalog import is_named
from autotune.base.files import write_atomic
from autotune.knobs import KNOBS, spell
from autotune.workload.learning_rate import follows
from autotune.profile.schema import Gives, Measured, Profile, ProfileWorkload, printable, shown
from autotune.base.records import Value

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
#: Plain scalars that YAML 1.1 reads as another type (https://yaml.org/type/bool.html and null.html).
_RETYPED = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
#: Largest column at which comments are aligned; longer lines are followed by their comment directly.
_WIDEST = 48

_SECTIONS = {
    "workload": "What is trained. path and module only say where it was found; sha256 says what it is.",
    "gives": "What it gives, as measured. Intervals are [low, high] at 95 %.",
    "baseline": "What it was compared with: the same training, as it ran before.",
    "best_same_batch": "The fastest at the baseline's own batch size and workload knobs.",
    "conditions": "How it was measured.",
    "fingerprint": "Where the figures hold: a machine that differs in one of these values gives other figures.",
    "versions": "Versions it was measured with.",
    "provenance": "Where the figures come from.",
}
_ABOUT = {
    "gives.speedup": "times the baseline's rate",
    "gives.compile_seconds": "s, the first step; not part of the rate",
    "gives.startup_seconds": "s, workload, model and first batch; not part of the rate",
    "gives.loader_wait_fraction": "share of a step spent waiting for the loader, 0 to 1",
    "gives.epoch_turn_seconds": "s between two epochs",
    "gives.launches": "independent processes that the figures rest on",
    "gives.same_batch": "whether it trains at the baseline's batch size",
    "gives.trains_like_fp32": "losses beside eager fp32's, from the same weights and batches",
    "gives.same_data": "what its loader delivers beside the baseline's, sample by sample",
    "gives.memory_headroom": "part of the memory that stayed free in a longer run",
    "gives.learning_rate": "of the first parameter group, as measured with this batch",
    "baseline.learning_rate": "of the first parameter group",
    "best_same_batch.speedup": "times the baseline's rate",
    "conditions.image_size": "pixels a side",
    "conditions.page_cache": "whether files were read from memory (warm) or perhaps the disk (cold)",
    "conditions.epoch_samples": "samples between two epoch turns",
    "conditions.allow_busy": "whether it was measured although others used the cores or the GPU",
    "conditions.cards": "that the script saw",
    "conditions.keeps_batch_size": "only the baseline's batch size was wanted",
    "fingerprint.device_uuid": "recorded, not compared",
    "provenance.score": "by the objective, higher is better",
    "provenance.trials": "how many ended how",
    "provenance.measured_seconds": "s inside kept windows",
    "provenance.elapsed_seconds": "s the search ran",
    "provenance.sha256": "of all the rest: tells whether it was changed since",
}


class _Representer(RoundTripRepresenter):
    """Represents scalars in a form that YAML 1.1 and 1.2 read alike."""

    def represent_number(self, value: float) -> Any:
        mantissa, e, exponent = repr(value).partition("e")
        # YAML 1.1 reads 1e-05 as text: a float needs a point (https://yaml.org/type/float.html).
        text = f"{mantissa}{'' if '.' in mantissa else '.0'}{e}{exponent}"
        return self.represent_scalar("tag:yaml.org,2002:float", text)

    def represent_nothing(self, value: None) -> Any:
        return self.represent_scalar("tag:yaml.org,2002:null", "null")


_Representer.add_representer(float, _Representer.represent_number)
_Representer.add_representer(type(None), _Representer.represent_nothing)


def dump(profile: Profile) -> str:
    """Return the profile as YAML with comments, from which `autotune.profile.parse` makes an equal profile."""
    data = profile.model_dump(mode="json")
    comments = {**_ABOUT, **_dynamic_comments(profile)}
    root = _node(data, "", 0, comments)
    for section in data:
        if section in _SECTIONS or section == "configuration":
            text = _SECTIONS.get(section) or _configuration_comment(profile)
            root.yaml_set_comment_before_after_key(section, before=f"\n{text}")
    yaml = YAML()
    yaml.Representer = _Representer
    # Folding long lines would be valid, but a folded path cannot be searched for.
    yaml.width = 2**31
    stream = io.StringIO()
    yaml.dump(root, stream)
    return f"{_header(profile)}\n{stream.getvalue()}"


def write(profile: Profile, path: Path) -> None:
    """Replace ``path`` by the profile, atomically.

    Raises:
        MachineError: the folder cannot be written; an existing file is unchanged.
    """
    write_atomic(path, dump(profile))


def _node(value: Any, path: str, depth: int, comments: dict[str, str]) -> Any:
    """Convert ``value`` to ruamel's types, with ``comments`` by dotted path at the ends of lines, aligned."""
    if isinstance(value, str):
        return DoubleQuotedScalarString(value)
    if isinstance(value, list):
        items = CommentedSeq(value)
        items.fa.set_flow_style()
        return items
    if not isinstance(value, dict):
        return value
    section = CommentedMap()
    paths = {key: f"{path}.{key}" if path else key for key in value}
    widths = [len(_line(key, item)) for key, item in value.items() if paths[key] in comments]
    column = 2 * depth + 2 + max((width for width in widths if width <= _WIDEST), default=0)
    for key, item in value.items():
        inner = paths[key]
        name = key if _PLAIN_KEY.fullmatch(key) and key.lower() not in _RETYPED else DoubleQuotedScalarString(key)
        section[name] = _node(item, inner, depth + 1, comments)
        if inner in comments:
            section.yaml_add_eol_comment(comments[inner], name, column=column)
    return section


def _line(key: str, value: Any) -> str:
    """Return approximately the line of ``key``; a section's line contains only its name."""
    return f"{key}:" if isinstance(value, dict) and value else f"{key}: {json.dumps(value, ensure_ascii=False)}"


def _dynamic_comments(profile: Profile) -> dict[str, str]:
    """Return the comments that depend on values: each knob compared with the baseline's, memory in GiB."""
    unit = profile.unit
    comments = {
        "gives.samples_per_second": f"{unit}, epoch turns weighed in",
        **{f"{section}.ci95": unit for section in ("gives", "baseline", "best_same_batch")},
        "gives.sustained_samples_per_second": f"{unit} in that run, at the clocks that the card holds",
    }
    sections: dict[str, Measured | Profile] = {"configuration": profile}
    if profile.best_same_batch is not None:
        sections["best_same_batch.configuration"] = profile.best_same_batch
    else:
        comments["best_same_batch"] = "none apart from the configuration above"
    if profile.workload.flags:
        comments["workload.flags"] = "--map, as it was given; it is given again, a profile adds no words to a command"
        comments["workload.own"] = "what the script does without these words"
    for section, holder in sections.items():
        for name, value in holder.configuration.items():
            comments[f"{section}.{name}"] = _against(profile, name, value)
    for name in profile.baseline.configuration:
        if name in KNOBS:
            comments[f"baseline.configuration.{name}"] = KNOBS[name].about
    memory = profile.gives.peak_memory_bytes
    if memory is not None:
        comments["gives.peak_memory_bytes"] = f"{memory / 2**30:.2f} GiB"
    return comments


def _against(profile: Profile, name: str, value: Value) -> str:
    before = profile.baseline.configuration.get(name)
    if before == value and type(before) is type(value):
        return "same"
    return "baseline: " + ("not set" if before is None else shown(spell(before), quoted=False))


def _configuration_comment(profile: Profile) -> str:
    text = "What to set, each line against the baseline's value."
    gone = [
        shown(f"{name} ({spell(value)})", quoted=False)
        for name, value in profile.baseline.configuration.items()
        if name not in profile.configuration
    ]
    return f"{text}\nSet in the baseline only: {', '.join(gone)}." if gone else text


def _header(profile: Profile) -> str:
    gives, batch = profile.gives, profile.configuration["batch_size"]
    before = profile.baseline.configuration["batch_size"]
    launches = "1 launch" if gives.launches == 1 else f"{gives.launches} launches"
    not_proven = [] if gives.unproven is None else [f"  note      {gives.unproven}"]
    own = profile.configuration == profile.baseline.configuration
    speedup = "not known: it was not launched in turns with the baseline"
    if gives.speedup is not None and gives.speedup_ci95 is not None:
        speedup = (
            f"{gives.speedup:.2f} times the baseline's {_rate(profile.baseline.samples_per_second)} {profile.unit}, "
            f"95 % interval {gives.speedup_ci95[0]:.2f} to {gives.speedup_ci95[1]:.2f}"
        )
    batch_line, learning = f"{batch}, as in the baseline", []
    if batch != before:
        batch_line = f"{batch}, where the baseline has {before}: the learning rate may have to follow"
        learning = [f"            {learning_rate_line(profile)}"]
    lines = [
        f"autotune profile: {profile.workload.name} on {profile.conditions.device_name}",
        "",
        f"  rate      {_rate(gives.samples_per_second)} {profile.unit}, 95 % interval "
        f"{_rate(gives.ci95[0])} to {_rate(gives.ci95[1])}, from {launches}",
        *_sustained(gives, profile.unit),
        f"  speedup   {'none: this is the baseline itself' if own else speedup}",
        *not_proven,
        *([f"  batch     {batch_line}"] if profile.conditions.counts == "samples" else []),
        *learning,
        f"  made      {profile.provenance.created}, study {profile.provenance.study}, trial {profile.provenance.trial}",
        "",
        "Train with it:",
        f"  {_how_to_train(profile.workload)}",
        "or in your own code:",
        '  profile = autotune.load_profile("profile.yaml")',
        "  loader, step = profile.prepare(model, optimizer, dataset, loss, shuffle=True, drop_last=True)",
        "where loss(model, batch) returns the loss; `for batch in loader: step(batch)` trains.",
        "",
        "The figures hold for the machine and the versions written below; elsewhere, search again.",
        "Text is quoted because some YAML readers take a bare off or no for false: keep the quotes.",
    ]
    return "".join(f"# {printable(line)}".rstrip() + "\n" for line in lines)


def learning_rate_line(profile: Profile) -> str:
    """Return what usually becomes of the learning rate with the profile's batch, in one sentence."""
    batch, before = (int(of.configuration["batch_size"]) for of in (profile, profile.baseline))
    return follows(batch, before, now=profile.gives.learning_rate, was=profile.baseline.learning_rate) + "."


def _how_to_train(workload: ProfileWorkload) -> str:
    """Return the command that trains with the profile."""
    named = workload.path is None and workload.module is None
    if named and not is_named(workload.name):
        # What it is run with, is the user's.
        flags = "".join(f"--map {shlex.quote(f'{name}={words}')} " for name, words in workload.flags.items())
        return f"autotune run --profile profile.yaml {flags}-- python {workload.name}.py …, or as you run it"
    train = ["autotune", "train", "--profile", "profile.yaml", "--model", workload.model]
    for name, value in workload.args.items():
        train += ["--arg", f"{name}={value}"]
    return shlex.join(train)


def _sustained(gives: Gives, unit: str) -> list[str]:
    """Return a line on the rate in a longer run if the promised interval does not reach down to it."""
    lower = gives.sustained_samples_per_second
    if lower is None or lower >= gives.ci95[0]:
        return []
    return [f"  sustained {_rate(lower)} {unit} in a longer run: expect this rate in a long training"]


def _rate(value: float) -> str:
    """Format a rate for people, with about four significant digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
