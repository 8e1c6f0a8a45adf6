"""The full report of a study: request, verdict, evidence, costs, and the next commands."""

from __future__ import annotations

import shlex

from autotune.space.formatting import (
    count,
    counts_text,
    describe,
    interval_text,
    model_name,
    one_line,
    rate_text,
    ratio_text,
    seconds_text,
)
from autotune.knobs import spell
from autotune.base.records import DataRef, Outcome, TrialStatus
from autotune.report.answer import answer_of, answer_section
from autotune.report.document import Commands, Document, Facts, Paragraph, Part, Section, Verbatim, facts, paragraphs
from autotune.report.epochs import epochs
from autotune.report.figures import finalists, knobs, ledger, limits
from autotune.report.heats import heats
from autotune.report.machine import failures, machine, where_it_holds
from autotune.report.material import Material
from autotune.report.pictures import pictures
from autotune.report.proofs import delivers, holds, trains
from autotune.report.sentences import (
    left_line,
    next_commands,
    predictions_line,
)
from autotune.report.so_far import best_so_far
from autotune.report.verdict import Won, verdict_on
from autotune.study.typed_request import command_of


def report_on(material: Material) -> Document:
    """Return the full report of a study, for a reader who did not follow the search.

    The report of an unfinished study has the sections for which there are results. Checks that were not made, or not
    recorded by an older version, are reported as missing or omitted.
    """
    outcome = material.outcome
    sections = [answer_section(answer_of(material)), *pictures(material)]
    if outcome is None:
        sections += best_so_far(material)
    else:
        sections += [
            *_verdict(outcome, material),
            finalists(outcome, material),
            *limits(outcome, material.trials),
            *epochs(outcome, material),
            *knobs(outcome),
            *trains(outcome),
            *delivers(outcome),
            *holds(outcome),
        ]
    baseline = outcome.baseline.config if outcome else next((t.config for t in material.trials), None)
    sections += [*heats(material.heats, baseline), *failures(material)]
    if outcome is not None:
        sections += [*_left(outcome), *ledger(outcome)]
    sections += [_asked(material), *machine(material)]
    if outcome is not None:
        sections += [*_profile(material), *where_it_holds(material)]
    sections.append(_next(material))
    return Document(title=title_of(material), sections=tuple(sections))


def title_of(material: Material) -> str:
    """Return what was trained where, and the study's name."""
    outcome, probe = material.outcome, material.probe
    device = outcome.device_name if outcome else probe.device_name if probe else material.device
    size = outcome.image_size if outcome else material.image_size
    return (
        f"{model_name(material.spec.model)} on {device}{'' if size is None else f', {size} px'}: study {material.name}"
    )


def _asked(material: Material) -> Section:
    spec, outcome = material.spec, material.outcome
    device, size = material.device, outcome.image_size if outcome else material.image_size
    name = outcome.device_name if outcome else material.probe.device_name if material.probe else ""
    return Section(
        "What was asked",
        facts(
            ("command", Verbatim(command_of(spec))),
            ("begun", spec.created[:16].replace("T", " ")),
            ("device", device if name in ("", device) else f"{name} ({device})"),
            ("image size", None if size is None else f"{size} px"),
            ("data", _data(material)),
            ("software", _software(material)),
            ("objective", None if spec.objective == "throughput" else spec.objective),
            ("search", _search(material)),
            *_tried(material),
            ("predictions", predictions_line(material.trials)),
        ),
    )


def _data(material: Material) -> str:
    data = material.data or DataRef(kind=material.spec.data)
    kinds = {"none": "the workload's own", "synthetic": "synthetic, made on the device's side of the loader"}
    what = kinds.get(data.kind, data.kind)
    if data.path is not None:
        what += f", {data.path}"
    if data.store is not None:
        what += f", behind a slow store that was put there ({data.store.words})"
    cache = (material.outcome.page_cache if material.outcome else None) or data.page_cache
    states = {
        "warm": "page cache warm, all files had been read before the first launch",
        "cold": "page cache cold, files may have come from the disk",
        "unknown": "whether its files came from the page cache or the disk is not known",
    }
    return what if cache is None else f"{what}; {states.get(cache, cache)}"


def _software(material: Material) -> str | None:
    probe = material.probe
    if probe is None:
        return None
    parts = {
        "torch": probe.torch_version,
        "torchvision": probe.torchvision_version,
        "CUDA": probe.cuda_version,
        "cuDNN": probe.cudnn_version,
        "Python": probe.python_version,
    }
    return ", ".join(f"{name} {version}" for name, version in parts.items() if version)


def _search(material: Material) -> str:
    outcome, spec = material.outcome, material.spec
    if outcome is None:
        spent = "" if material.spent_s is None else f", {seconds_text(material.spent_s)} used"
        return (
            f"not finished; {count(len(material.trials), 'trial')}{spent} of a budget of {seconds_text(spec.budget_s)}"
        )
    data = f"; making the data took {seconds_text(outcome.data_s)} before" if outcome.data_s >= 1 else ""
    return (
        f"{count(sum(outcome.trials.values()), 'trial')} ({counts_text(outcome.trials)}) in "
        f"{seconds_text(outcome.elapsed_s)} of a budget of {seconds_text(spec.budget_s)}; {outcome.stopped.rstrip('.')}"
        f"{data}"
    )


def _tried(material: Material) -> list[tuple[str, str | None]]:
    """Return how many values of each knob were tried, and which knobs had one value in all trials.

    A value that was not tried, for lack of time or expected gain, is not known to be slower.
    """
    tried = [
        t.config for t in material.trials if t.result.status is not TrialStatus.INTERRUPTED and not t.result.transient
    ]
    tried += [e.config for h in material.heats for e in h.heat.entrants if e.status is not TrialStatus.INTERRUPTED]
    varied, same = [], []
    for name, values in material.choices.items():
        seen = {spell(config[name]) for config in tried if name in config}
        if len(values) > 1 and len(seen) > 1:
            varied.append(f"{name} {len(seen.intersection(values))} of {len(values)}")
        elif len(values) > 1:
            same.append(name)
    if not tried:
        return []
    return [("values tried", " · ".join(varied) or None), ("never varied", ", ".join(same) or None)]


def _verdict(outcome: Outcome, material: Material) -> list[Section]:
    """Return the answer with every figure that supports it; nothing if there is no more to say."""
    verdict = verdict_on(outcome, material.trials)
    best, own, dropped = verdict.best, verdict.own, paragraphs(*verdict.dropped)
    if verdict.headline is not None:
        return [Section("Verdict", dropped)] if dropped else []
    # Another objective, or a requirement that the baseline does not meet, may choose what is slower.
    by_rate = material.spec.objective == "throughput" and best.standing.speedup >= 1
    chosen = "fastest" if by_rate else "best"
    which = "What is likely the fastest" if verdict.likely else f"The {chosen}"
    found: list[Part] = [Paragraph(_winner(which, best, outcome))]
    at_own = f"{verdict.own_title[0].upper()}{verdict.own_title[1:]}"
    if verdict.one_winner:
        found += paragraphs(f"That is {verdict.own_title}. {best.consequence}")
    elif own.is_baseline:
        found += paragraphs(best.consequence, f"{at_own} nothing was shown to be faster than the baseline.")
    else:
        fastest = _winner(f"{at_own} the {chosen}", own, outcome)
        found += paragraphs(best.consequence, f"{fastest} {own.consequence}")
    found += paragraphs(verdict.likely, verdict.tie, verdict.cautions, verdict.break_even, *verdict.edges)
    return [Section("Verdict", (*found, *dropped))]


def _winner(title: str, won: Won, outcome: Outcome) -> str:
    standing, baseline, evidence = won.standing, outcome.baseline, outcome.evidence
    shown = "" if won.shown else " That is not shown to be faster."
    if evidence is not None and not won.is_baseline:
        rest = one_line(evidence)
    elif standing.verified:
        base = " of each" if baseline.launches == standing.launches else f" and {baseline.launches} of the baseline"
        rest = f"{count(standing.launches, 'fresh launch', 'fresh launches')}{base}, in turns"
    else:
        rest = "the search's own launch, whose figure is too good on average because it was chosen for it"
    return (
        f"{title} is trial {won.label}, {describe(standing.config, baseline.config)}: "
        f"{rate_text(standing.samples_per_second, standing.ci95)} {outcome.unit}, "
        f"{ratio_text(standing.speedup, standing.speedup_ci95)} the baseline's "
        f"{rate_text(baseline.samples_per_second, baseline.ci95)} "
        f"(95 %: {interval_text(standing.speedup_ci95)}), from {rest}.{shown}"
    )


def _profile(material: Material) -> list[Section]:
    if material.profile is None:
        return []
    rows = tuple((name, spell(value)) for name, value in material.profile.configuration.items())
    return [Section("The profile", (Facts(rows),))]


def _left(outcome: Outcome) -> list[Section]:
    found = paragraphs(left_line(outcome))
    return [Section("Files left behind", found)] if found else []


def _next(material: Material) -> Section:
    typed = shlex.quote(material.typed)
    if material.outcome is None:
        return Section("Next", (Commands((f"autotune resume {typed}", f"autotune show {typed}")),))
    own = [c for c in next_commands(material.outcome, material.folder) if not c.startswith("autotune report")]
    report = f"autotune report {typed} -o {shlex.quote(f'{material.name}.md')}"
    return Section("Next", (Commands(tuple(dict.fromkeys([*own, f"autotune show {typed}", report]))),))
