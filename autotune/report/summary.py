"""The table at the end of a search, and the text under it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path, PurePath

from rich.console import Group, RenderableType
from rich.text import Text

from autotune.space.formatting import (
    count,
    counts_text,
    describe,
    interval_text,
    memory_text,
    model_name,
    one_line,
    rate_text,
    ratio_text,
    seconds_text,
    settings,
    trial_peak_bytes,
    trial_rate_text,
)
from autotune.base.layout import StudyFiles
from autotune.base.records import Finding, Outcome, Standing, Trial, TrialStatus
from autotune.report.answer import headline_of
from autotune.report.lines import Line
from autotune.report.sentences import (
    BUSY_ALLOWED,
    RANKS,
    batch_of,
    full_stop,
    is_out,
    knobs_line,
    label_of,
    ledger_line,
    limit_line,
    next_commands,
    profile_path,
    proof_line,
    standings,
    study_folder,
)
from autotune.report.tables import new_table, status_cell
from autotune.report.verdict import SearchVerdict, Won, required_line, verdict_on

#: Minimum number of complete configurations in the table besides the baseline, and maximum number of failures.
TOP, FAILURES = 5, 3
#: Failures that the configuration itself caused. They are shown first, the others follow by trial number.
_NOTABLE = (TrialStatus.OOM, TrialStatus.HOST_OOM, TrialStatus.COMPILE_FAILED, TrialStatus.DIVERGED)


def best_table(outcome: Outcome, trials: Sequence[Trial], folder: PurePath | None = None) -> RenderableType:
    """Return the summary of a search: the best trials against the baseline, winners, evidence and next commands.

    Args:
        folder: the reader's current folder, absolute. Paths below it are shown relative to it.
    """
    baseline, verdict = outcome.baseline, verdict_on(outcome, trials)
    # Dropped finalists are listed below: in the table their rates would look like a winner's.
    ranked = [s for s in standings(outcome) if not is_out(outcome, s)]
    table = new_table("trial", "optimization", outcome.unit, "speedup", "peak\nmemory", "status")
    winners = [c for c in (outcome.best.config, outcome.best_same_batch.config) if c != baseline.config]
    for standing in ranked:
        own = standing is baseline
        table.add_row(
            label_of(standing, trials),
            Text(f"baseline: {settings(baseline.config)}" if own else describe(standing.config, baseline.config)),
            rate_text(standing.samples_per_second, standing.ci95),
            ratio_text(standing.speedup),
            memory_text(standing.peak_memory_bytes),
            "likely" if outcome.evidence and standing.config in winners else _proven(standing),
            style="bold green" if standing.config in winners else "",
        )
    shown = {s.trial for s in ranked} | outcome.dropped.keys()
    for trial in _others(trials, shown, TOP + 1 - len(ranked)) + _notable_failures(trials):
        complete = trial.result.status is TrialStatus.COMPLETE
        table.add_row(
            str(trial.number),
            Text(describe(trial.config, baseline.config)),
            trial_rate_text(trial),
            # Its launch and the baseline's were at different moments, so there is no ratio to state.
            "",
            memory_text(trial_peak_bytes(trial)),
            status_cell(trial.result.status),
            style="" if complete else "dim",
        )
    where = "" if outcome.image_size is None else f", {outcome.image_size} px"
    title = Text(f"{model_name(outcome.model)} on {one_line(outcome.device_name)}{where}", style="bold")
    won = outcome.found in (Finding.FASTER, Finding.LIKELY)
    answer = [Text(headline_of(outcome), style="bold"), Text()] if won else []
    parts = (
        title,
        *answer,
        table,
        *_notes(outcome, ranked),
        Text(),
        *_winners(verdict, outcome),
        *_because(outcome, verdict),
        Text(),
        *_closing(outcome, trials, folder),
    )
    return Group(*(Line(part) if isinstance(part, Text) else part for part in parts))


def _proven(standing: Standing) -> str:
    """Say how often a configuration was launched in turns. Once proves nothing."""
    if not standing.verified:
        return "complete"
    return f"verified ×{standing.launches}" if standing.launches > 1 else "in turns, once"


def _others(trials: Sequence[Trial], shown: Collection[int], limit: int) -> list[Trial]:
    scored = [t for t in trials if t.score is not None and t.number not in shown]
    return sorted(scored, key=lambda t: t.score or 0.0, reverse=True)[: max(0, limit)]


def _notable_failures(trials: Sequence[Trial]) -> list[Trial]:
    """Return, for each failure status, the trial with the smallest batch, which shows where the limit is."""
    smallest: dict[TrialStatus, Trial] = {}
    for trial in trials:
        status = trial.result.status
        if status in (TrialStatus.COMPLETE, TrialStatus.PRUNED, TrialStatus.INTERRUPTED):
            continue
        if status not in smallest or batch_of(trial.config) < batch_of(smallest[status].config):
            smallest[status] = trial
    rank = {status: i for i, status in enumerate(_NOTABLE)}
    found = sorted(smallest.values(), key=lambda t: (rank.get(t.result.status, len(rank)), t.number))
    return found[:FAILURES]


def _notes(outcome: Outcome, ranked: Sequence[Standing]) -> list[Text]:
    notes = [f"Peak memory is the {one_line(outcome.memory_is)}'s."]
    if any(s.verified for s in ranked):
        notes.insert(
            0,
            "verified ×N: N fresh launches, in turns with the baseline's. Other rows rest on one each, at another "
            "moment, so their speedup is not known.",
        )
    if outcome.ranks > 1:
        notes.append(RANKS.format(outcome.ranks))
    if outcome.require:
        notes.append(f"Required: {required_line(outcome)}")
    if outcome.objective != "throughput":
        notes.append(f"Ordered by the objective {one_line(outcome.objective)}.")
    if outcome.allow_busy:
        notes.append(BUSY_ALLOWED)
    if outcome.page_cache == "cold":
        notes.append("The data does not fit into the page cache: its files may have come from the disk.")
    return [Text(" ".join(notes), style="dim")]


def _winners(verdict: SearchVerdict, outcome: Outcome) -> list[RenderableType]:
    if verdict.headline is not None:
        text = Text(verdict.headline, style="bold yellow")
        return [text.append(f" {verdict.advice}", style="not bold default")]
    best, own = verdict.best, verdict.own
    if verdict.one_winner:
        which = "Likely best" if verdict.likely else "Best"
        lines = _winner(f"{which}, overall and {verdict.own_title}", best, outcome)
    elif own.is_baseline:
        itself: RenderableType = Text.assemble((f"Best {verdict.own_title}: ", "bold"), "the baseline itself.")
        lines = [itself, *_winner("Best overall", best, outcome)]
    else:
        lines = [*_winner(f"Best {verdict.own_title}", own, outcome), *_winner("Best overall", best, outcome)]
    more = [Text(verdict.likely, style="yellow")] if verdict.likely else []
    return [*lines, *more, *([Text(verdict.break_even)] if verdict.break_even else [])]


def _winner(title: str, won: Won, outcome: Outcome) -> list[RenderableType]:
    standing, baseline = won.standing, outcome.baseline
    text = Text(f"{title}: ", style="bold")
    text.append(describe(standing.config, baseline.config), style="green")
    speedup = ratio_text(standing.speedup, standing.speedup_ci95)
    figures = f"{rate_text(standing.samples_per_second, standing.ci95)} {outcome.unit}, {speedup}"
    text.append(f", {figures} the baseline (95 %: {interval_text(standing.speedup_ci95)})", style="not bold")
    if not won.shown:
        text.append("; not shown to be faster than the baseline", style="yellow")
    return [text, Line(won.consequence, 4)]


def _because(outcome: Outcome, verdict: SearchVerdict) -> list[Text]:
    """Return the evidence for the winner and against others, one line per check that was made."""
    lines = [
        proof_line(outcome),
        limit_line(outcome),
        knobs_line(outcome),
        *verdict.edges,
        verdict.tie,
        *verdict.dropped,
    ]
    known = [Text(line) for line in lines if line]
    return [Text(), *known] if known else []


def _disturbed(trials: Sequence[Trial]) -> list[Text]:
    """Return the number of trials given up because of other processes on the machine, with advice."""
    some = [t.result for t in trials if t.result.status is TrialStatus.INTERRUPTED and t.result.transient]
    if not some:
        return []
    cause, advice = one_line(some[-1].cause or "").partition(";")[0], full_stop(some[-1].advice or "")
    return [Text(f"{count(len(some), 'trial')} given up because {cause}. {advice}".rstrip(), style="yellow")]


def _closing(outcome: Outcome, trials: Sequence[Trial], folder: PurePath | None) -> list[RenderableType]:
    kept = f"of which {seconds_text(outcome.measured_s)} inside kept windows"
    spent = [
        full_stop(outcome.stopped),
        ledger_line(outcome.ledger) or f"{seconds_text(outcome.elapsed_s)} of searching, {kept}.",
        f"Making the data took {seconds_text(outcome.data_s)} before that." if outcome.data_s >= 1 else "",
        f"Waiting for a quiet device took {seconds_text(outcome.wait_s)} more." if outcome.wait_s >= 1 else "",
    ]
    profile = profile_path(outcome, folder)
    whose = "Profile of the baseline" if outcome.found is Finding.KEEP else "Profile"
    files = [] if outcome.profile is None else [(whose, profile)]
    report = StudyFiles(Path(study_folder(outcome))).report
    if report.is_file():
        files.append(("Report", profile.with_name(report.name)))
    return [
        Text(f"{count(sum(outcome.trials.values()), 'trial')}: {counts_text(outcome.trials)}."),
        *_disturbed(trials),
        Text(" ".join(filter(None, spent))),
        Text(),
        *(Line(Text.assemble((f"{what}: ", "bold"), one_line(str(file))), verbatim=True) for what, file in files),
        Text("Next:", style="bold"),
        *(Line(command, 2, verbatim=True) for command in next_commands(outcome, folder)),
    ]
