"""Heats in a search: who takes part, what is learnt, and that nothing is lost."""

import io
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from autotune.base.errors import InterruptedSearch, MachineError, NoVerdictError
from autotune.base.records import Config, Heat, HeatEntrant, LaunchKind, Side, StudyHeat, TrialSpec, TrialStatus
from autotune.report import heat_table, read_material, report_on, to_text
from autotune.samplers import Experience
from autotune.samplers.auto.features import LACK_SD, Shown, corrections
from autotune.samplers.auto.rates import Observation, Prior, RateModel, Regression
from autotune.search import resume, search
from autotune.space import delivery_part, device_part, key, why_apart
from autotune.study.tables import read_heats, read_trials
from tests.support import Play, make_measurement

from .test_search import cpu_space
from .world import World, plain


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A search that has ended, for those who only look at it."""
    world = World(tmp_path_factory.mktemp("searched"))
    search(world.spec(), world.folder, world.env(plain))
    return world


def entrants_of(heats: list[StudyHeat]) -> list[Config]:
    return [e.config for heat in heats for e in heat.heat.entrants]


def heat_specs(world: World, name: str = "heat-") -> list[TrialSpec]:
    specs = [s for launcher in world.launchers for s in launcher.specs]
    return [s for s in specs if s.kind is LaunchKind.HEAT and s.launch.startswith(name)]


class TestContrasts:
    PRIOR = Prior(np.array([0.0, 0.2, 0.0]), np.array([10.0, 0.3, 0.2]), np.array([False, False, False]))

    def test_only_differences_count(self) -> None:
        """They are what is left if each heat has an offset of its own of which nothing is known."""
        rng = np.random.default_rng(1)
        rows = np.column_stack([np.ones(5), rng.integers(0, 2, (5, 2))]).astype(float)
        seen, sds = rng.normal(size=5), np.array([0.02, 0.02, 0.05, 0.02, 0.1])
        told, shifted = Regression(self.PRIOR, (1.0,)), Regression(self.PRIOR, (1.0,))
        told.add_contrasts(rows, seen, sds)
        shifted.add_contrasts(rows, seen + 7.0, sds)
        wide = Prior(np.append(self.PRIOR.mean, 0.0), np.append(self.PRIOR.sd, 1e4), np.append(self.PRIOR.fine, False))
        offset = Regression(wide, (1.0,))
        for row, one, sd in zip(rows, seen, sds, strict=True):
            offset.add(np.append(row, 1.0), one, (0.1 / sd) ** 2)
        # Without factors chosen by evidence, which would differ between the two.
        found, again, expected = told.fit(0.1, doubt=1.0), shifted.fit(0.1, doubt=1.0), offset.fit(0.1, doubt=1.0)
        assert found.mean[1:] == pytest.approx(expected.mean[1:-1], abs=1e-4)
        assert again.mean == pytest.approx(found.mean)
        own, other = found.predict(np.eye(3))[1], expected.predict(np.eye(4)[:3])[1]
        assert own[1:] == pytest.approx(other[1:], rel=1e-3)

    def test_one_alone_says_nothing(self) -> None:
        regression = Regression(self.PRIOR)
        regression.add_contrasts(np.array([[1.0, 1.0, 0.0]]), np.array([3.0]), np.array([0.01]))
        assert regression.fit(0.1).mean == pytest.approx(self.PRIOR.mean)


class TestShown:
    PARTS = ("a", "b", "c", "d")
    #: A constant and one effect, which is 0.2 in every draw; c and d have it.
    ROWS = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    EFFECTS = np.array([[3.0, 3.0], [0.2, 0.2]])

    def shown(self, *seen: float, sd: float = 0.01) -> Shown:
        return Shown(self.PARTS, self.ROWS, np.array(seen), np.full(4, sd))

    def test_what_the_model_says_rightly_is_left_alone(self) -> None:
        found = corrections([self.shown(1.0, 1.0, 1.2, 1.2)], self.EFFECTS, [*self.PARTS, "other"])
        assert np.abs(found).max() < 1e-12

    def test_an_entrants_own_difference_counts_and_moves_nobody_else(self) -> None:
        found = corrections([self.shown(0.0, 0.0, 0.2, 0.5)], self.EFFECTS, ["d", "c", "other"])
        share = LACK_SD**2 / (LACK_SD**2 + 0.01**2)
        assert found == pytest.approx(np.array([[0.3 * share] * 2, [0.0] * 2, [0.0] * 2]))

    def test_the_more_precise_the_more_and_two_heats_more_than_one(self) -> None:
        rough, fine = self.shown(0.0, 0.0, 0.2, 0.5, sd=0.1), self.shown(0.0, 0.0, 0.2, 0.5)
        one, two, best = (corrections(h, self.EFFECTS, ["d"])[0, 0] for h in ([rough], [rough, rough], [fine]))
        assert 0 < one < two < best < 0.3
        assert corrections([], self.EFFECTS, ["d"]) == 0.0

    def test_entrants_are_expected_to_train_as_they_did_even_where_effects_do_not_add_up(self) -> None:
        space = cpu_space()
        model = RateModel(space)
        plain_one = dict(space.baseline)
        model.add(Observation(plain_one, 4.0, 4.01, 9.0))
        bf16 = {**plain_one, "precision": "bf16"}
        last = {**plain_one, "memory_format": "channels_last"}
        large = {**bf16, "memory_format": "channels_last", "batch_size": 64}
        field = [plain_one, bf16, last, {**bf16, "memory_format": "channels_last"}, {**bf16, "batch_size": 64}, large]
        # Each change alone slows the training down, and all of them together make it fast.
        ratios = np.array([0.0, -0.2, -0.2, -0.1, -0.2, 0.3])
        model.add_heat("device", field, list(ratios), [0.01] * 6)
        found = model.fit(0.03).mean(model.pool(field))
        assert found - np.median(found) == pytest.approx(ratios - np.median(ratios), abs=0.04)


def test_a_number_of_workers_was_compared_whatever_the_queue_is() -> None:
    config: Config = {"batch_size": 8, "num_workers": 4, "prefetch_factor": 2, "precision": "fp32", "workload.a": 1}
    assert delivery_part(config) == delivery_part({**config, "prefetch_factor": 8, "precision": "bf16"})
    others = {"num_workers": 8}, {"batch_size": 16}, {"workload.a": 2}
    assert all(delivery_part(config) != delivery_part({**config, **change}) for change in others)


@pytest.mark.parametrize(
    ("side", "status", "learnt"),
    [
        ("device", TrialStatus.OOM, True),
        ("device", TrialStatus.SHM_EXHAUSTED, False),
        ("loader", TrialStatus.SHM_EXHAUSTED, True),
        ("loader", TrialStatus.OOM, False),
    ],
)
def test_a_heat_teaches_what_its_side_can_show(side: Side, status: TrialStatus, learnt: bool) -> None:
    config = {**cpu_space().baseline, "num_workers": 8, "prefetch_factor": 2, "persistent_workers": False}
    entrants = HeatEntrant(config={**config, "num_workers": 1}), HeatEntrant(config=config, status=status)
    heat = Heat(side=side, entrants=entrants, noise_sd=0.01, startup_s=0, switch_s=0, measured_s=0, ended="as told")
    experience = Experience()
    experience.learn_heat(StudyHeat(number=1, after=1, heat=heat, wall_s=1.0))
    assert bool(experience.lessons.rule_out(config)) == learnt


class TestInASearch:
    @pytest.mark.slow
    def test_a_heat_follows_the_first_trials_and_its_best_is_tried(self, searched: World) -> None:
        world = searched
        heats = read_heats(world.files)
        assert heats and heats[0].after >= 1 and heats[0].number == 1
        entrants = heats[0].heat.entrants
        assert len(entrants) >= 6
        assert len({key(e.config) for e in entrants}) == len(entrants)
        assert all(why_apart(entrants[0].config, e.config) is None for e in entrants)
        best = max(entrants, key=lambda e: e.ratio or 0.0)
        # The best of it, or what is expected to be faster still.
        own, *others = read_trials(world.files)
        assert key(entrants[0].config) == key(own.config)
        assert max(t.rate_per_s or 0.0 for t in others) > 0.98 * (own.rate_per_s or 0.0) * (best.ratio or 0.0)
        assert world.outcome.best.samples_per_second > 30 * 1.6 * 1.25 * 1.15

    @pytest.mark.parametrize("changes", [{"sampler": "random"}, {"objective": "memory_thrift"}])
    def test_other_samplers_and_objectives_have_none(self, world: World, changes: dict[str, str]) -> None:
        search(world.spec(budget_s=200, **changes), world.folder, world.env(plain))
        assert not heat_specs(world) and not read_heats(world.files)

    @pytest.mark.slow
    def test_a_loader_that_limits_leaves_nothing_to_compare(self, world: World) -> None:
        """Workers decide everything, and no heat shows them."""

        def starved(spec: TrialSpec) -> Play:
            workers = int(spec.config.get("num_workers", 0))
            return Play(rate_per_s=10.0 * (1 + workers), wall_s=15.0)

        search(world.spec(budget_s=600), world.folder, world.env(starved))
        best = world.outcome.best.config
        assert best["num_workers"] == max(int(t.config.get("num_workers", 0)) for t in read_trials(world.files))

    @pytest.mark.slow
    def test_where_nothing_waits_no_workers_are_tried_first_and_none_win(self, world: World) -> None:
        def device_bound(spec: TrialSpec) -> Play:
            rate = 30.0 * (1.6 if spec.config["precision"] == "bf16" else 1.0)
            changes = {"device_per_s": rate, "loader_capacity_per_s": 100 * rate, "loader_wait_fraction": 0.002}
            measurement = make_measurement(rate, batch_size=int(spec.config["batch_size"]), **changes)
            return Play(rate_per_s=rate, wall_s=15.0, measurement=measurement)

        search(world.spec(budget_s=600, fixed={"compile_mode": "off"}), world.folder, world.env(device_bound))
        assert all(heat.heat.side == "device" for heat in read_heats(world.files))
        assert read_trials(world.files)[1].config["num_workers"] == 0
        assert world.outcome.best.config["num_workers"] == 0

    @pytest.mark.slow
    def test_workers_are_compared_in_a_heat_of_the_loader(self, world: World) -> None:
        def starved(spec: TrialSpec) -> Play:
            workers = int(spec.config.get("num_workers", 0))
            loader, device = 10.0 * max(1, workers), 60.0
            # Up to six workers help, if there were so many: then the device is the limit.
            rate = min(loader, device) if workers else 1 / (1 / loader + 1 / device)
            changes = {
                "device_per_s": device,
                "loader_capacity_per_s": loader,
                "loader_wait_fraction": 1 - rate / device,
            }
            batch = int(spec.config["batch_size"])
            return Play(rate_per_s=rate, wall_s=60.0, measurement=make_measurement(rate, batch_size=batch, **changes))

        search(world.spec(budget_s=2400, fixed={"batch_memory": "fresh"}), world.folder, world.env(starved))
        heats = [heat for heat in read_heats(world.files) if heat.heat.side == "loader"]
        assert heats and heats[0].after == 1
        entrants = [e.config for e in heats[0].heat.entrants]
        loaders = ("num_workers", "prefetch_factor", "persistent_workers", "batch_memory")
        parts = {key({n: v for n, v in c.items() if n not in loaders}) for c in entrants}
        assert len(parts) == 1 and len({c["num_workers"] for c in entrants}) >= 3
        assert world.outcome.best.samples_per_second == pytest.approx(60.0, rel=0.05)
        trials = [t for t in read_trials(world.files) if t.number]
        assert int(trials[0].config["num_workers"]) >= 4

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("status", "again"), [(TrialStatus.CRASHED, False), (TrialStatus.OOM, False), (TrialStatus.KILLED, True)]
    )
    def test_who_fails_in_a_heat_takes_part_in_no_other(self, world: World, status: TrialStatus, again: bool) -> None:
        bad: list[str] = []

        def brittle(spec: TrialSpec) -> Play:
            part = key(device_part(spec.config))
            if spec.kind is LaunchKind.HEAT and spec.config["optimizer_impl"] == "foreach" and not bad:
                bad.append(part)
            if spec.kind is LaunchKind.HEAT and part in bad and not (again and len(heat_specs(world)) > 1):
                return Play(status=status, wall_s=3.0)
            return plain(spec)

        search(world.spec(budget_s=300), world.folder, world.env(brittle))
        assert bad
        heats = read_heats(world.files)
        rows = [e for heat in heats for e in heat.heat.entrants if key(device_part(e.config)) in bad]
        if again:
            assert rows[0].status in (TrialStatus.COMPLETE, TrialStatus.PRUNED)
        else:
            assert [row.status for row in rows] == [status]
            others = [e for e in heats[0].heat.entrants if key(device_part(e.config)) not in bad]
            assert len(others) >= 2 and all(e.ratio is not None for e in others)

    @pytest.mark.slow
    @pytest.mark.parametrize("budget_s", [600, 900])
    def test_a_first_compilation_must_fit_even_if_it_is_slow(self, world: World, budget_s: int) -> None:
        def worthwhile(spec: TrialSpec) -> Play:
            return Play(rate_per_s=48.0 if spec.config["compile_mode"] == "default" else 30.0, wall_s=10.0)

        fixed = {"num_workers": "0", "memory_format": "contiguous"}
        search(world.spec(budget_s=budget_s, fixed=fixed), world.folder, world.env(worthwhile))
        # A heat would be lost if its time were up while it compiled, so a trial comes first; and it comes soon, as
        # nothing among those that do not compile is faster.
        first = [h for h in read_heats(world.files) if h.after <= 2]
        assert first and not any(c["compile_mode"] == "default" for c in entrants_of(first))
        modes = [trial.config["compile_mode"] for trial in read_trials(world.files)]
        assert "default" in modes[:4]
        assert world.outcome.best.config["compile_mode"] == "default"

    @pytest.mark.slow
    def test_a_heat_that_shows_nothing_ends_no_search(self, world: World) -> None:
        def never(spec: TrialSpec) -> Play:
            if spec.kind is LaunchKind.HEAT:
                return Play(status=TrialStatus.KILLED, wall_s=2.0)
            return plain(spec)

        search(world.spec(budget_s=600), world.folder, world.env(never))
        assert all(e.status is TrialStatus.INTERRUPTED for h in read_heats(world.files) for e in h.heat.entrants)
        assert world.outcome.best.speedup > 1.5

    @pytest.mark.slow
    def test_the_gains_of_knobs_come_from_one_heat(self, world: World) -> None:
        search(
            world.spec(budget_s=600, fixed={"compile_mode": "off", "num_workers": "0"}), world.folder, world.env(plain)
        )
        parts = {p.knob: p for p in world.outcome.ablation}
        assert len(heat_specs(world, "ablate-heat")) == 1
        assert parts["precision"].in_heat and parts["precision"].gain is not None
        # Without workers a sixth of the winner's time is waiting, which no precision shortens.
        assert parts["precision"].gain[0] == pytest.approx((5 * 1.6 + 1) / 6)


class TestNothingIsLost:
    def stopped_after_a_heat(self, world: World, played: Callable[[TrialSpec], Play] = plain) -> list[StudyHeat]:
        def script(spec: TrialSpec) -> Play:
            if read_heats(world.files):
                world.signal = 2
            return played(spec)

        with pytest.raises(InterruptedSearch):
            search(world.spec(), world.folder, world.env(script))
        world.signal = None
        return read_heats(world.files)

    @pytest.mark.slow
    @pytest.mark.parametrize("database", [True, False], ids=["kept", "moved away"])
    def test_a_resumed_search_knows_its_heats(self, world: World, database: bool) -> None:
        before = self.stopped_after_a_heat(world)
        if not database:
            world.files.database.unlink()
        resume(world.files, world.env(plain))
        after = read_heats(world.files)
        assert before and [(h.heat, h.after) for h in after[: len(before)]] == [(h.heat, h.after) for h in before]
        names = [s.launch for s in heat_specs(world)]
        assert all(names.count(f"heat-{heat.number}-1") == 1 for heat in before)

    def test_a_heat_of_several_launches_is_known_too(self, world: World) -> None:
        """Each of them may take another time, by what the search has left."""

        def brittle(spec: TrialSpec) -> Play:
            crashes = spec.kind is LaunchKind.HEAT and spec.config["optimizer_impl"] == "foreach"
            return Play(status=TrialStatus.CRASHED, wall_s=3.0) if crashes else plain(spec)

        before = self.stopped_after_a_heat(world, brittle)
        stored = world.files.launch("heat-1-2").spec
        spec = TrialSpec.model_validate_json(stored.read_text())
        assert spec.heat is not None
        hurried = spec.model_copy(update={"heat": spec.heat.model_copy(update={"wall_s": 7.0})})
        stored.write_text(hurried.model_dump_json())
        world.files.database.unlink()
        resume(world.files, world.env(brittle))
        after = read_heats(world.files)
        assert before and [h.heat for h in after[: len(before)]] == [h.heat for h in before]
        assert [s.launch for s in heat_specs(world)].count("heat-1-1") == 1

    @pytest.mark.slow
    def test_a_heat_that_was_killed_is_run_again(self, world: World, searched: World) -> None:
        """The kill comes in the middle of its launch."""
        number = next(i for i, s in enumerate(searched.launchers[0].specs) if s.kind is LaunchKind.HEAT)
        with pytest.raises(KeyboardInterrupt):
            search(world.spec(), world.folder, world.env(plain, {number: KeyboardInterrupt()}))
        assert not read_heats(world.files)
        resume(world.files, world.env(plain))
        first, second = (s for s in heat_specs(world) if s.launch == "heat-1-1")
        # There is less time left, so it may have fewer entrants.
        assert first.config == second.config and read_heats(world.files)[0].heat.entrants[0].ratio == 1.0

    def test_each_entrant_has_a_row(self, searched: World) -> None:
        world = searched
        entrants = len(entrants_of(read_heats(world.files)))
        with closing(sqlite3.connect(world.files.database)) as connection:
            query = "select count(*) from autotune_entrants where launch like 'heat-%'"
            assert connection.execute(query).fetchone() == (entrants,)
            sides = connection.execute("select distinct side from autotune_entrants").fetchall()
            rows = connection.execute("select kind from autotune_launches where launch = 'heat-1-1'").fetchall()
        assert rows == [("heat",)] and sides == [("device",)]

    def test_heats_of_before_there_were_any_of_the_loader_are_read(self, searched: World) -> None:
        stored = read_heats(searched.files)[0].model_dump(mode="json")
        del stored["heat"]["side"]
        assert StudyHeat.model_validate(stored) == read_heats(searched.files)[0]


class TestTold:
    def test_the_report_explains_and_lists_them(self, searched: World) -> None:
        world = searched
        heats = read_heats(world.files)
        material = read_material(world.files, world.outcome, typed="s", folder=world.folder)
        text = to_text(report_on(material))
        assert "train in turns" in text and f"Heat {heats[0].number}:" in text
        assert "dropped out, certainly behind" in text and "the reference" in text

    def test_the_table_has_the_fastest_first(self, searched: World) -> None:
        world = searched
        heat = read_heats(world.files)[0]
        text = printed(heat_table(heat, read_trials(world.files)[0].config))
        shown = [float(line.split("×")[0]) for line in text.splitlines() if "×" in line]
        assert shown == sorted(shown, reverse=True) and len(shown) == len(heat.heat.entrants)


def printed(renderable: object) -> str:
    stream = io.StringIO()
    Console(width=160, file=stream).print(renderable)
    return stream.getvalue()


class TestVerdict:
    def test_a_budget_that_is_over_after_the_baseline_allows_no_verdict(self, world: World) -> None:
        nothing = "nothing but the baseline was measured: no other launch fits"
        with pytest.raises(NoVerdictError, match=nothing) as raised:
            search(world.spec(budget_s=20), world.folder, world.env(plain))
        assert re.fullmatch(r"go on with: autotune resume \S+ --budget \+\d+s", str(raised.value.advice))

    @pytest.mark.slow
    def test_what_only_heats_have_seen_is_no_verdict(self, world: World) -> None:
        """Every trial but the baseline's is disturbed, and the heats show something faster."""

        def disturbed(spec: TrialSpec) -> Play:
            if spec.kind is LaunchKind.MEASURE and spec.number:
                return Play(status=TrialStatus.INTERRUPTED, transient=True, cause="others used 1.8 cores", wall_s=4.0)
            return plain(spec)

        with pytest.raises(MachineError, match="nothing but the baseline was measured"):
            search(world.spec(budget_s=200), world.folder, world.env(disturbed))
        assert read_heats(world.files) and not world.files.profile.exists()
