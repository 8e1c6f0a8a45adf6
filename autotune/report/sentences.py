"""A search in sentences. Its answer in one, the headline, is in `autotune.report.full_report`."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import median

from autotune.base.records import (
    Bottleneck,
    Config,
    DataVerdict,
    Finding,
    HoldVerdict,
    KnobPart,
    LedgerRow,
    LeftFiles,
    Limit,
    Measurement,
    Outcome,
    Standing,
    TrainVerdict,
    Trial,
)
from autotune.profile import follows
from autotune.space import is_checked_by, key
from autotune.space.formatting import (
    count,
    describe,
    interval_text,
    listed,
    memory_text,
    one_line,
    percent_text,
    percents,
    phrase,
    rate_text,
    ratio_text,
    seconds_text,
    trial_rate_text,
)
from autotune.study.history import BETWEEN

#: Takes the number of ranks.
RANKS = "{} ranks train together: rates are of all of them, batch sizes and memory each one's."
BUSY_ALLOWED = "Measured with --allow-busy: what others did on the machine meanwhile is in the figures."


def batch_of(config: Config) -> int:
    """Return the batch size of a configuration, 0 if it has none."""
    return int(config.get("batch_size", 0))


def predictions_line(trials: Sequence[Trial]) -> str | None:
    """Return the median errors of the sampler's predictions as text; ``None`` if it made none."""
    predicted = [(t.predicted, t) for t in trials if t.predicted is not None and t.score is not None]
    if not predicted:
        return None
    rates = [abs(p.rate_per_s / t.score - 1) for p, t in predicted if t.score]
    seconds = [abs(p.seconds / t.result.wall_s - 1) for p, t in predicted if t.result.wall_s]
    peaks = [
        abs(p.peak_bytes / t.result.measurement.peak_bytes - 1)
        for p, t in predicted
        if p.peak_bytes and t.result.measurement and t.result.measurement.peak_bytes
    ]
    parts = [
        f"{percent_text(median(errs))} ({name})" for name, errs in (("rates", rates), ("seconds", seconds)) if errs
    ]
    parts += [f"{percent_text(median(peaks))} (memory, where it was predicted)"] if peaks else []
    return f"off by {listed(parts)}, the median of {count(len(predicted), 'trial')}"


def standings(outcome: Outcome) -> list[Standing]:
    """Return the baseline, the winner, the other finalists (best first), then the dropped ones, without duplicates."""
    others = sorted((outcome.best_same_batch, *outcome.finalists), key=lambda s: (is_out(outcome, s), -s.score))
    unique: dict[str, Standing] = {}
    for standing in (outcome.baseline, outcome.best, *others):
        unique.setdefault(key(standing.config), standing)
    return list(unique.values())


def is_out(outcome: Outcome, standing: Standing) -> bool:
    """Return whether a finalist was dropped.

    The trial number is not enough: a winner whose configuration was derived from a dropped trial shares its number.
    """
    kept = (outcome.baseline, outcome.best, outcome.best_same_batch)
    return standing.trial in outcome.dropped and all(key(s.config) != key(standing.config) for s in kept)


def label_of(standing: Standing, trials: Sequence[Trial]) -> str:
    """Return the trial's number, with a prime if the configuration was derived from the trial's but differs from it."""
    launched = next((key(t.config) for t in trials if t.number == standing.trial), key(standing.config))
    return f"{standing.trial}{'' if launched == key(standing.config) else '′'}"


def measurement_of(standing: Standing, trials: Sequence[Trial]) -> Measurement | None:
    """Return the measurement of the search's own launch of a standing's trial, or ``None`` if there is none."""
    return next((t.result.measurement for t in trials if t.number == standing.trial), None)


def check_of(outcome: Outcome, standing: Standing) -> TrainVerdict | None:
    """Return the training check of a configuration, if there was one.

    A winner without one of its knobs has its trial's number, too: the check is that of what computes in the same way,
    or else, where there was no time to compile, eagerly.
    """
    checks = [c for c in outcome.checks if standing.trial in c.trials]
    alike = [c for c in checks if is_checked_by(standing.config, c.config)]
    return next(iter([*alike, *checks]), None)


def data_of(outcome: Outcome, standing: Standing) -> DataVerdict | None:
    """Return the verdict on whether a standing's loader delivers the same data as the baseline's, if it was checked."""
    verdicts = [verdict for verdict in outcome.data if key(verdict.config) == key(standing.config)]
    return verdicts[0] if verdicts else None


def unchecked(outcome: Outcome, standing: Standing) -> str | None:
    """Return why it is unknown whether a configuration trains like the baseline, as a clause; ``None`` if it does."""
    data, check = data_of(outcome, standing), check_of(outcome, standing)
    gaps = [
        ("what its loader delivers was not compared", None if data is None or data.passed else data.reason),
        ("how it trains was not checked", None if check is None or check.passed is not None else check.reason),
    ]
    return "; ".join(f"{gap} ({one_line(reason).rstrip('.')})" for gap, reason in gaps if reason) or None


def bottleneck_of(outcome: Outcome, standing: Standing) -> Bottleneck | None:
    """Return the bottleneck of a configuration, if it was measured."""
    same_trial = [b for b in outcome.bottlenecks if b.trial == standing.trial]
    same_rate = [b for b in same_trial if b.samples_per_s == standing.samples_per_second]
    is_shared = sum(s.trial == standing.trial for s in standings(outcome)) > 1
    return next(iter(same_rate or ([] if is_shared else same_trial)), None)


def standing_of(outcome: Outcome, bottleneck: Bottleneck) -> Standing | None:
    """Return a bottleneck's standing. The rate decides: a winner whose useless knobs were set back keeps its number."""
    candidates = (s for s in standings(outcome) if s.trial == bottleneck.trial)
    return next((s for s in candidates if s.samples_per_second == bottleneck.samples_per_s), None)


def full_stop(text: str) -> str:
    """Return ``text`` on one line, with a capital first letter and one full stop at the end."""
    return _capitalized(ended(text))


def _capitalized(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def ended(text: str) -> str:
    """Return ``text`` on one line, ending in one full stop, for use after a colon."""
    text = one_line(text).rstrip(".")
    return text if text.endswith(("!", "?", "…")) else f"{text}."


def dropped_lines(outcome: Outcome, trials: Sequence[Trial]) -> list[str]:
    """Return one sentence per dropped finalist: its configuration, its rate in the search, and why it was dropped."""
    by_number = {t.number: t for t in trials}
    lines = []
    for number, text in outcome.dropped.items():
        subject, reason = f"Trial {number}", one_line(text)
        trial = by_number.get(number)
        if trial is not None:
            rate = "" if trial.rate_per_s is None else f", {trial_rate_text(trial)} {outcome.unit} in the search"
            subject += f" ({describe(trial.config, outcome.baseline.config)}{rate})"
        verb = "was " if reason.startswith("fast but wrong") else "is out: "
        verb = "" if reason.startswith(("did ", "ended ")) else verb
        lines.append(full_stop(f"{subject} {verb}{reason}"))
    return lines


def trains_line(check: TrainVerdict | None) -> str | None:
    """Return whether the winner trains like eager fp32, as a sentence; ``None`` without a check."""
    if check is None:
        return None
    reason = one_line(check.reason or "no reason was given").rstrip(".")
    if check.passed is None:
        return f"Whether the winner trains was not checked: {reason}."
    if not check.passed:
        return f"The winner is fast but wrong: {reason}."
    return f"The winner trains as {check.beside} does{f': {reason}' if check.reason else ''}."


def data_line(data: DataVerdict | None) -> str | None:
    """Return whether a loader delivers the same data as the baseline's, as a sentence; ``None`` without a check."""
    if data is None:
        return None
    reason = one_line(data.reason or "").rstrip(".")
    if data.needless:
        return "Data: its loader is set as the baseline's."
    if data.passed is None:
        return f"What its loader delivers was not compared: {reason}."
    if not data.passed:
        return f"Its loader delivers other data: {reason}."
    remark = f"; {reason}" if reason else ""
    epochs = f" in {count(data.epochs, 'epoch')}" if data.epochs > 1 else ""
    batches = f"{count(data.batches, 'batch', 'batches')} ({count(data.samples, 'sample')}){epochs}"
    return f"Data compared: {batches}, equal{remark}."


def holds_line(verdict: HoldVerdict | None) -> str | None:
    """Return whether the winner stays within the memory, as a sentence; ``None`` without a check."""
    if verdict is None:
        return None
    reason = one_line(verdict.reason or "no reason was given").rstrip(".")
    if verdict.passed is None:
        if verdict.hold is not None:
            return f"The winner fits, and was not seen to settle: {reason}."
        return f"Whether the winner holds was not checked: {reason}."
    if not verdict.passed:
        # Refer to the trial by its number: it is no longer the winner.
        return f"Trial {verdict.trial} does not hold: {reason}."
    if verdict.hold is None:
        return "The winner holds."
    free, wanted = percent_text(verdict.hold.headroom), percent_text(verdict.headroom_wanted)
    return f"The winner holds: {free} of the memory stays free, {wanted} are wanted."


def sustained_line(outcome: Outcome) -> str | None:
    """Return the winner's rate in a longer training as a sentence, if it is below the interval of the proven rate."""
    verdict, best = outcome.hold, outcome.best
    if verdict is None or verdict.hold is None or verdict.sustained_per_s is None or verdict.trial != best.trial:
        return None
    if verdict.sustained_per_s >= best.ci95[0]:
        return None
    clock = "" if verdict.hold.sm_clock_mhz is None else f", with the card at {verdict.hold.sm_clock_mhz:,} MHz"
    proven = rate_text(best.samples_per_second, best.ci95)
    return (
        f"In {seconds_text(verdict.hold.seconds + verdict.hold.sustained_s)} of training its rate fell to "
        f"{rate_text(verdict.sustained_per_s)} {outcome.unit}{clock}, below the {proven} of the short launches: expect "
        f"the lower rate in a long training."
    )


def proof_line(outcome: Outcome, standing: Standing | None = None) -> str | None:
    """Return the results of a configuration's checks as sentences, or ``None`` if there were none.

    They are those of `trains_line`, `data_line`, `holds_line` and `sustained_line`. Only the winner's memory and
    sustained rate are checked.

    Args:
        standing: of the configuration; ``None`` for the winner.
    """
    standing = standing or outcome.best
    is_winner = standing.config == outcome.best.config
    sentences = (
        trains_line(check_of(outcome, standing)),
        data_line(data_of(outcome, standing)),
        holds_line(outcome.hold) if is_winner else None,
        sustained_line(outcome) if is_winner else None,
    )
    return " ".join(filter(None, sentences)) or None


def limit_line(outcome: Outcome, standing: Standing | None = None) -> str | None:
    """Return the bottleneck of a configuration as a sentence; ``None`` if it was not measured.

    Args:
        standing: of the configuration; ``None`` for the winner.
    """
    bottleneck = bottleneck_of(outcome, standing or outcome.best)
    if bottleneck is None:
        return None
    subject = "The baseline" if bottleneck.trial == outcome.baseline.trial else "The winner"
    limit = (
        bottleneck.sentence
        if bottleneck.sentence.startswith(bottleneck.limit.value)
        else f"{bottleneck.limit}: {bottleneck.sentence}"
    )
    sentence = full_stop(f"{subject} is {limit}")
    if bottleneck.limit is not Limit.LOADER or outcome.no_more_workers is None:
        return sentence
    return f"{sentence} More workers were not tried: {ended(one_line(outcome.no_more_workers))}"


def by_gain(parts: Sequence[KnobPart]) -> list[KnobPart]:
    """Sort knobs by gain, largest first, with those that have no figure last."""
    return sorted(parts, key=lambda p: -math.inf if p.gain is None else p.gain[0], reverse=True)


def knobs_line(outcome: Outcome) -> str | None:
    """Return the knobs' gains: ``What gave it: bf16 1.42× (1.38–1.46), channels_last 1.20× (1.1–1.3).``"""
    baseline, best = outcome.baseline.config, outcome.best.config
    measured = by_gain(outcome.ablation)
    set_back = [phrase(p.knob, p.value) for p in measured if best.get(p.knob) == baseline.get(p.knob)]
    parts = [p for p in measured if best.get(p.knob) != baseline.get(p.knob)]
    useless = [p for p in parts if p.gain and p.gain[1] <= 1]
    again = [p for p in useless if p.launches != 1]
    clauses = {
        "What gave it": [f"{phrase(p.knob, p.value)} {gain_words(p.gain)}" for p in parts if p.gain and p.gain[1] > 1],
        "not shown to matter, but no better without": [phrase(p.knob, p.value) for p in again if not p.in_heat],
        "not shown to matter in a heat": [phrase(p.knob, p.value) for p in again if p.in_heat],
        "not shown to matter by one launch without, too little to set back": [
            phrase(p.knob, p.value) for p in useless if p.launches == 1
        ],
        "set back, as it was not shown to matter": set_back,
        "gain not measured": [phrase(p.knob, p.value) for p in parts if not p.gain],
    }
    said = "; ".join(f"{words}: {', '.join(phrases)}" for words, phrases in clauses.items() if phrases)
    return full_stop(said) if measured else None


def ledger_line(rows: Sequence[LedgerRow]) -> str | None:
    """Return how the time was spent: ``10 min in all: 52 % in kept windows, 21 % warming up, …``.

    Parts that round to 0 % are omitted.
    """
    total_s = sum(r.seconds for r in rows)
    if total_s <= 0:
        return None
    launches = [r for r in rows if r.purpose != BETWEEN]
    kept_s = sum(r.kept_s for r in launches)
    parts_s = {
        "compiling and first steps": sum(r.compile_s for r in launches),
        "starting": sum(r.start_s for r in launches),
        "warming up": sum(r.warmup_s for r in launches),
    }
    rest_s = sum(r.seconds for r in launches) - kept_s - sum(parts_s.values())
    ordered = sorted(parts_s.items(), key=lambda item: -item[1])
    between_s = total_s - sum(r.seconds for r in launches)
    shares_s = [("in kept windows", kept_s), *ordered, ("in the rest of launches", rest_s), (BETWEEN, between_s)]
    shares = percents([max(0.0, part_s) for _, part_s in shares_s])
    shown = [
        f"{share} % {name}"
        for share, (name, _) in zip(shares, shares_s, strict=True)
        if share or name == shares_s[0][0]
    ]
    return f"{seconds_text(total_s)} in all: {', '.join(shown)}."


def edge_lines(outcome: Outcome) -> list[str]:
    """Return a sentence for each knob of the winner at the end of its range, with the command to search beyond it."""
    return [
        f"{_capitalized(phrase(e.knob, e.value))} is the most that was offered, and more may be faster: {e.command}"
        for e in outcome.edges
    ]


def gain_text(gain: tuple[float, float, float]) -> tuple[str, str]:
    """Format a ratio and its interval as two table cells."""
    return ratio_text(gain[0], gain[1:]), interval_text(gain[1:]).replace(" to ", "–")


def gain_words(gain: tuple[float, float, float]) -> str:
    """Format a ratio and its interval: ``2.06× (2.03–2.09)``."""
    ratio, interval = gain_text(gain)
    return f"{ratio} ({interval})"


def left_text(left: LeftFiles, own_folders: Sequence[str]) -> str:
    """Return a sentence on files that a script's launches may have left.

    Args:
        own_folders: options that already gave launches folders of their own; the sentence suggests the others.
    """
    ways = {
        "--output-flag": "--output-flag FLAG gives each launch a folder to write to",
        "--scratch": "--scratch runs each in one",
    }
    advice = listed([way for flag, way in ways.items() if flag not in own_folders])
    return (
        f"{count(left.number, 'file')} in {one_line(left.folder)} ({memory_text(left.size_bytes)}) "
        f"{'is' if left.number == 1 else 'are'} new or changed since the search began: "
        f"{', '.join(map(one_line, left.names))}{', …' if left.number > len(left.names) else ''}. The script runs at "
        f"every launch, and writes each time{f'; {advice}, removed at its end' if advice else ''}."
    )


def study_folder(outcome: Outcome) -> PurePath:
    """Return the study's folder. Outcomes of older versions have only the path of the profile in it."""
    return PurePath(outcome.folder) if outcome.folder else PurePath(outcome.profile or "").parent


def profile_path(outcome: Outcome, folder: PurePath | None) -> PurePath:
    """Return the path of the profile, relative to ``folder`` if it lies below it."""
    file = study_folder(outcome) / "profile.yaml"
    return file.relative_to(folder) if folder is not None and file.is_relative_to(folder) else file


def study_name(outcome: Outcome, folder: PurePath | None) -> str:
    """Return the study as a command-line argument: its name in the default folder, otherwise its path."""
    file = profile_path(outcome, folder)
    return outcome.study if file.parent == PurePath("studies", outcome.study) else str(file.parent)


def next_commands(outcome: Outcome, folder: PurePath | None) -> list[str]:
    """Return the commands to run after a search: train or run, report, and export.

    If the search found nothing to train with beyond what the user already has, they are show and report.
    """
    profile, study = one_line(str(profile_path(outcome, folder))), one_line(outcome.study)
    quoted = shlex.quote(one_line(study_name(outcome, folder)))
    if outcome.profile is None or outcome.found is Finding.KEEP:
        return [*([outcome.again] if outcome.again else []), f"autotune show {quoted}", f"autotune report {quoted}"]
    if outcome.command:
        script = shlex.join(map(one_line, outcome.command))
        flags = "".join(f"--map {shlex.quote(one_line(f'{name}={words}'))} " for name, words in outcome.flags.items())
        train = f"autotune run --profile {shlex.quote(profile)} {flags}-- {script}"
    else:
        train = f"autotune train --profile {shlex.quote(profile)} --model {shlex.quote(one_line(outcome.model))}"
    # Export standalone code, which does not exist for several ranks.
    code = f"--format python -o {re.sub(r'[^a-z0-9]', '_', study.lower())}.py"
    export = f"-o {shlex.quote(f'{study}.yaml')}" if outcome.ranks > 1 else code
    again = [outcome.again] if outcome.again else []
    return [train, *again, f"autotune report {quoted}", f"autotune export {quoted} {export}"]


def listed_trials(numbers: Sequence[int | str]) -> str:
    """List trials by number: ``trial 3``, ``trials 3, 4 and 17``."""
    return f"trial{'' if len(numbers) == 1 else 's'} {listed([str(n) for n in numbers])}"


# The verdict on a search as data, from which the table at the end of a search and the report are both rendered.

NOTHING_FASTER = "No configuration was shown to be faster than the baseline."


def nothing_better(outcome: Outcome) -> str:
    """Say that nothing was shown to be better than the baseline, by whatever was to be better."""
    if outcome.objective == "throughput":
        return NOTHING_FASTER
    return f"No configuration was shown to be better than the baseline by the objective {one_line(outcome.objective)}."


NO_VERDICT = "No verdict, and no profile."
SAME_MATHS = "Epochs, updates and learning rate stay as they are."


@dataclass(frozen=True)
class Won:
    """A winning configuration, overall or at the user's batch size, and whether it was shown to be faster than the
    baseline. The consequence is how it changes the training, in sentences."""

    standing: Standing
    label: str
    is_baseline: bool
    shown: bool
    consequence: str


@dataclass(frozen=True)
class SearchVerdict:
    """The verdict on a search. All texts are whole sentences.

    Attributes:
        nothing_faster, advice: the verdict if nothing was shown to be faster than the baseline, or else ``None``.
        best: the winner overall.
        own: the winner that keeps the user's own training; may be the same configuration.
        own_title: what `own` is the best of, as the beginning of a sentence.
        likely: the evidence that makes the winner likely, and why it is not proven; ``None`` if it is proven, or if
            there is no winner.
        tie: the configurations that the winner was preferred to; ``None`` also if the advice mentions them.
        cautions: checks that the winner did not pass.
        break_even: when compiling pays off.
        dropped: a sentence for each dropped finalist.
        edges: a sentence for each knob of the winner at the end of its range.
    """

    nothing_faster: str | None
    advice: str | None
    best: Won
    own: Won
    own_title: str
    likely: str | None = None
    tie: str | None = None
    cautions: str | None = None
    break_even: str | None = None
    dropped: tuple[str, ...] = ()
    edges: tuple[str, ...] = ()

    @property
    def one_winner(self) -> bool:
        """Whether the overall winner is also the winner at the user's own batch size."""
        return key(self.best.standing.config) == key(self.own.standing.config)


def verdict_on(outcome: Outcome, trials: Sequence[Trial]) -> SearchVerdict:
    best, own = outcome.best, outcome.best_same_batch
    anything = outcome.found in (Finding.FASTER, Finding.LIKELY)
    gaps = unchecked(outcome, own)
    unchanged = SAME_MATHS if gaps is None else f"{SAME_MATHS} Not checked: {gaps}."
    changes = unchanged if key(best.config) == key(own.config) else _what_changes(outcome, trials)
    tie = full_stop(outcome.tie) if outcome.tie else None
    likely: str | None = None
    advice: str | None = None
    if outcome.found is Finding.OPEN:
        advice = " ".join(full_stop(part) for part in (outcome.because, outcome.advice) if part)
    elif not anything:
        tried = "is left" if outcome.dropped else "was tried"
        advice = f"{tie or f'It is the best of what {tried}.'} Keep what you have."
    if outcome.evidence is not None:
        because = f", because {one_line(outcome.because).rstrip('.')}" if outcome.because else ""
        evidence = f"This is likely, by {one_line(outcome.evidence)}"
        likely = f"{evidence}. It is not proven by separate launches in turns{because}."
    check, hold = check_of(outcome, best), outcome.hold
    cautions = (
        trains_line(check) if check is not None and not check.passed else None,
        holds_line(hold) if hold is not None and not hold.passed else None,
    )
    baseline = key(outcome.baseline.config)
    won, own_won = (
        Won(one, label_of(one, trials), key(one.config) == baseline, one.speedup_ci95[0] > 1, consequence)
        for one, consequence in ((best, changes), (own, unchanged))
    )
    return SearchVerdict(
        nothing_faster=None if anything else NO_VERDICT if outcome.found is Finding.OPEN else nothing_better(outcome),
        advice=advice,
        best=won,
        own=own_won,
        own_title=_own_title(outcome),
        likely=likely,
        tie=tie if anything else None,
        cautions=" ".join(filter(None, cautions)) or None,
        break_even=_break_even(outcome),
        dropped=tuple(dropped_lines(outcome, trials)),
        edges=tuple(edge_lines(outcome)),
    )


def required_line(outcome: Outcome) -> str | None:
    """Return the requirements, and whether the baseline meets them, as a sentence; ``None`` if there are none."""
    if not outcome.require:
        return None
    met = f"the baseline does not: {outcome.baseline_unmet}" if outcome.baseline_unmet else "the baseline meets it, too"
    return f"{' and '.join(outcome.require)}; {met}."


def _own_title(outcome: Outcome) -> str:
    """Name the group of configurations that train as the user does today, by batch size if that sets it apart."""
    best, baseline = batch_of(outcome.best.config), batch_of(outcome.baseline.config)
    if outcome.keeps_batch_size or (
        best == baseline and key(outcome.best.config) != key(outcome.best_same_batch.config)
    ):
        # Without a comparison, do not claim that the training is the same.
        return (
            "with its batch size as it is"
            if unchecked(outcome, outcome.best_same_batch)
            else "with the training as it is"
        )
    return f"at your own batch size ({baseline})"


def _what_changes(outcome: Outcome, trials: Sequence[Trial]) -> str:
    """Describe how the winner, whose maths differ from the baseline's, changes the training."""
    standing, baseline = outcome.best, outcome.baseline.config
    config = standing.config
    batch, baseline_batch = batch_of(config), batch_of(baseline)
    names = [
        n
        for n, v in config.items()
        if n.startswith("workload.") and n not in outcome.speed_only and baseline.get(n) != v
    ]
    parts = (
        [f"It sets {', '.join(phrase(n, config[n]) for n in names)}, which may change what is trained"] if names else []
    )
    if batch != baseline_batch:
        factor, word = (batch / baseline_batch, "fewer") if batch > baseline_batch else (baseline_batch / batch, "more")
        steps = ""
        measured = measurement_of(standing, trials)
        if measured is not None and measured.epoch_samples:
            now, before = (math.ceil(measured.epoch_samples / outcome.ranks / size) for size in (batch, baseline_batch))
            steps = f": an epoch is {count(now, 'step')} instead of {before:,}"
        launches = (measured, measurement_of(outcome.baseline, trials))
        rate_now, rate_before = (None if launch is None else launch.learning_rate for launch in launches)
        parts.append(
            f"Batch {batch} instead of {baseline_batch}{steps}. The same number of epochs makes {factor:.3g}× {word} "
            f"updates. {follows(batch, baseline_batch, now=rate_now, was=rate_before)}"
        )
    return ". ".join(parts) + "."


def _break_even(outcome: Outcome) -> str | None:
    pays, baseline = outcome.break_even, outcome.baseline.config
    if pays is None:
        return None
    rival = "the baseline" if key(pays.eager_config) == key(baseline) else describe(pays.eager_config, baseline)
    eager = f"{rival}, {rate_text(pays.eager_samples_per_second)} {outcome.unit}"
    when = f"after {count(pays.steps, 'step')}" if pays.steps else "from the first step"
    cost = seconds_text(pays.compile_s)
    return f"Compiling costs {cost}, and is ahead of the best eager finalist ({eager}) {when}."
