"""The legal configurations on a machine, and the reasons of refusals."""

from __future__ import annotations

from itertools import islice, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.errors import UnknownNameError, UsageError
from autotune.base.records import Probe, Value
from autotune.knobs import KNOBS, Scope, spell
from autotune.knobs.compile_mode import CUDAGRAPH_MODES
from autotune.space import Choice, Space, SpaceRequest, build_space, canonical, key
from tests.support import make_host, make_probe

MIB = 2**20
CUDA: dict[str, Any] = {
    "device": "cuda:0",
    "device_name": "A card",
    "device_memory_bytes": 80 * 2**30,
    "tf32": True,
    "cudagraphs": True,
    "compiler": "triton 3.5",
    "cuda_version": "12.8",
    "cudnn_version": "91002",
}
HOST = make_host(cores=2, memory_bytes=8 * 2**30, available_bytes=6 * 2**30, shm_bytes=2**30, shm_free_bytes=2**30)


def cpu(**changes: Any) -> Probe:
    return make_probe(**{"cores": 2, "sample_bytes": None, **changes})


def cuda(**changes: Any) -> Probe:
    return cpu(**{**CUDA, **changes})


def space_for(probe: Probe, **request: Any) -> Space:
    return build_space(probe, HOST, SpaceRequest(**request))


def why_not(space: Space, name: str, value: Value) -> str | None:
    (choice,) = (c for c in space.choices[name] if c.value == value)
    return choice.refused


probes = st.builds(
    lambda base, changes: make_probe(**{**base, **changes}),
    st.sampled_from([{}, CUDA]),
    st.fixed_dictionaries(
        {
            "native_bf16": st.booleans(),
            "tf32": st.booleans(),
            "cudagraphs": st.booleans(),
            "compiler": st.sampled_from([None, "g++"]),
            "varying_shapes": st.booleans(),
            "has_images": st.booleans(),
            "optimizer_impls": st.sampled_from([("for-loop",), ("for-loop", "foreach"), ("for-loop", "fused")]),
            "cores": st.integers(1, 48),
            "default_batch_size": st.integers(1, 300),
            "dataset_samples": st.sampled_from([None, 64, 1024]),
            "sample_bytes": st.sampled_from([None, 400_000, 50 * MIB]),
            "workload_knobs": st.sampled_from([{}, {"blur": (False, True)}, {"depth": (3, 1, 2)}]),
        }
    ),
)


class TestLegality:
    def test_more_workers_than_a_machine_can_stand(self) -> None:
        with pytest.raises(UsageError, match="num_workers=65 is not possible here: with 2 cores, 64 is the most"):
            space_for(cpu(), fixed={"num_workers": 65})
        assert space_for(cpu(), fixed={"num_workers": 64}).legal("num_workers") == (64,)

    def test_a_cpu(self) -> None:
        space = space_for(cpu())
        assert space.legal("precision") == ("fp32", "bf16")
        assert space.legal("compile_mode") == ("off", "default")
        for name in ("pin_memory", "cudnn_benchmark", "alloc_conf"):
            assert "CUDA" in space.inactive[name] and name not in space.choices
        for name, value in (("precision", "fp16"), ("precision", "tf32"), ("compile_mode", "reduce-overhead")):
            assert "CUDA" in str(why_not(space, name, value))

    def test_a_card(self) -> None:
        space = space_for(cuda())
        for name in ("precision", "compile_mode", "cudnn_benchmark", "alloc_conf", "optimizer_impl", "non_blocking"):
            assert space.legal(name) == KNOBS[name].values
        assert space.legal("memory_format") == ("contiguous", "channels_last")
        exchange = [name for name, knob in KNOBS.items() if knob.scope is Scope.EXCHANGE]
        host_only = ["intra_op_threads", "malloc"]
        assert list(space.inactive) == ["gradient_accumulation", "deterministic", *host_only, *exchange]

    def test_a_workloads_knob_may_take_part_only_where_it_is_asked_for(self) -> None:
        probe = cpu(workload_knobs={"decoder": ("pillow", "other")}, workload_unasked=("decoder",))
        name = "workload.decoder"
        assert "--set workload.decoder=pillow,other" in space_for(probe).inactive[name]
        assert name not in space_for(probe).baseline and name not in space_for(probe).choices
        asked = space_for(probe, narrowed={name: ("pillow", "other")})
        assert asked.legal(name) == ("pillow", "other") and asked.baseline[name] == "pillow"
        assert space_for(probe, fixed={name: "other"}).baseline[name] == "pillow"

    @pytest.mark.parametrize(
        ("sample_mib", "sentence"),
        [
            (1, None),
            (2, "/dev/shm has 512 MiB, so at most 2 of 8 workers are tried at batch 32 (Docker: --shm-size"),
            (20, "/dev/shm has 512 MiB, so no workers are tried at batch 32"),
            (None, None),
        ],
    )
    def test_what_a_small_shm_rules_out_is_said(self, sample_mib: int | None, sentence: str | None) -> None:
        sample_bytes = None if sample_mib is None else sample_mib * MIB
        host = make_host(cores=4, shm_free_bytes=512 * MIB if sample_mib != 1 else 64 * 1024 * MIB)
        probe = cpu(sample_bytes=sample_bytes, default_batch_size=32, cores=4)
        found = build_space(probe, host, SpaceRequest(narrowed={"num_workers": (0, 1, 2, 4, 8)})).shm_sentence
        assert found is None if sentence is None else str(found).startswith(sentence)

    def test_volumes(self) -> None:
        assert space_for(cpu(has_images=False, has_volumes=True)).legal("memory_format") == (
            "contiguous",
            "channels_last_3d",
        )
        # PyTorch converts all weights to one format, or none.
        assert space_for(cpu(has_volumes=True, mixed_formats=True)).legal("memory_format") == ("contiguous",)

    def test_determinism_is_a_condition(self) -> None:
        space = space_for(cuda(), fixed={"deterministic": True})
        assert space.legal("deterministic") == (True,) and space.baseline["deterministic"] is False
        assert space.legal("cudnn_benchmark") == (False,)
        assert "determinism" in str(why_not(space, "cudnn_benchmark", True))
        priced = space_for(cuda(), baseline={"deterministic": True})
        assert priced.baseline["deterministic"] is True and priced.legal("deterministic") == (False, True)

    def test_an_old_card(self) -> None:
        space = space_for(cuda(tf32=False, native_bf16=False, compiler=None))
        assert space.legal("precision") == ("fp32", "fp16")
        assert "8.0" in str(why_not(space, "precision", "tf32"))
        assert "emulates" in str(why_not(space, "precision", "bf16"))
        assert space.legal("compile_mode") == ("off",)
        assert "compiler" in str(why_not(space, "compile_mode", "default"))

    def test_a_small_card_has_nothing_to_autotune(self) -> None:
        small = space_for(cuda(multiprocessors=58))
        assert "68 multiprocessors" in str(why_not(small, "compile_mode", "max-autotune"))
        assert small.legal("compile_mode") == ("off", "default", "reduce-overhead")
        assert "max-autotune" in space_for(cuda(multiprocessors=68)).legal("compile_mode")
        stated = space_for(cuda(multiprocessors=58), fixed={"compile_mode": "max-autotune"})
        assert stated.legal("compile_mode") == ("max-autotune",)

    def test_emulated_bf16_is_refused_on_a_cpu_too(self) -> None:
        assert "emulates" in str(why_not(space_for(cpu(native_bf16=False)), "precision", "bf16"))

    def test_varying_shapes_rule_out_knobs_that_need_fixed_shapes(self) -> None:
        space = space_for(cuda(varying_shapes=True))
        assert space.legal("cudnn_benchmark") == (False,)
        assert space.legal("compile_mode") == ("off", "default")
        for mode in CUDAGRAPH_MODES:
            assert "shapes" in str(why_not(space, "compile_mode", mode))
        assert "shape" in str(why_not(space, "cudnn_benchmark", True))

    def test_what_a_user_states_is_measured_even_where_images_vary(self) -> None:
        for stated in ({"cudnn_benchmark": True}, {"compile_mode": "reduce-overhead"}):
            for varying in ({"varying_shapes": True}, {"images_vary": True}):
                (name,) = stated
                space = space_for(cuda(**varying), baseline=stated)
                assert space.baseline[name] == stated[name]
                # It may be combined with other values, as everything of the baseline.
                assert stated[name] in space.legal(name) and KNOBS[name].default in space.legal(name)
                assert space_for(cuda(**varying), fixed=stated).legal(name) == (stated[name],)
                with pytest.raises(UsageError, match="shape"):
                    space_for(cuda(**varying), narrowed={name: (stated[name],)})
        with pytest.raises(UsageError, match="CUDA graphs"):
            space_for(cpu(), fixed={"compile_mode": "reduce-overhead"})

    def test_box_lists_of_varying_length_do_not_rule_out_cudnns_benchmark(self) -> None:
        space = space_for(cuda(varying_shapes=True, images_vary=False))
        assert space.legal("cudnn_benchmark") == (False, True)
        assert space.legal("compile_mode") == ("off", "default")

    def test_images_that_are_seen_to_vary_rule_out_both(self) -> None:
        space = space_for(cuda(images_vary=True))
        assert space.legal("cudnn_benchmark") == (False,)
        assert space.legal("compile_mode") == ("off", "default")

    def test_a_workload_without_images_has_no_memory_format(self) -> None:
        assert space_for(cpu(has_images=False)).legal("memory_format") == ("contiguous",)

    def test_only_supported_optimizer_implementations_are_legal(self) -> None:
        assert space_for(cpu(optimizer_impls=("for-loop",))).legal("optimizer_impl") == ("for-loop",)

    def test_workers_exceed_the_cores_and_batches_surround_the_users_own(self) -> None:
        space = space_for(cpu(), batch_size=24)
        assert space.legal("num_workers") == (0, 1, 2, 4, 8)
        assert space.legal("batch_size") == (12, 24, 48, 96)
        assert max(space_for(cuda(), batch_size=24).legal("batch_size")) == 24 * 16
        assert space_for(cpu(), batch_size=1).legal("batch_size") == (1, 2, 4)
        assert space_for(cpu(cores=6)).legal("intra_op_threads") == (1, 2, 4, 6)

    def test_no_more_workers_than_a_training_can_use(self) -> None:
        host = HOST.model_copy(update={"cores": 128, "available_bytes": 2**40})
        assert max(build_space(cpu(), host, SpaceRequest()).legal("num_workers")) == 64

    @pytest.mark.parametrize(
        ("facts", "most"),
        [
            # Small images on a large card: at least 16 steps an epoch.
            ({"sample_bytes": 12_288, "dataset_samples": 50_000}, 2048),
            # Images of 600 kB, of which 16 times their size fit: 80 GiB hold some 8,900.
            ({"sample_bytes": 600_000, "dataset_samples": 1_281_167}, 8192),
            # Never more than 256 times as many.
            ({"sample_bytes": 4_000, "dataset_samples": 1_281_167}, 32 * 256),
            # What is not known widens nothing, and a small set takes nothing away.
            ({"sample_bytes": None, "dataset_samples": 1_281_167}, 512),
            ({"sample_bytes": 600_000, "dataset_samples": 1024}, 512),
        ],
    )
    def test_on_a_card_batches_grow_as_far_as_memory_and_data_may_hold(self, facts: dict[str, Any], most: int) -> None:
        space = space_for(cuda(**facts))
        assert max(space.legal("batch_size")) == most
        # Beyond 16 times the baseline's only beside the best so far.
        assert max(space.rungs("batch_size")) == 512
        assert (1024 in space.beside("batch_size", 512)) == (most > 512)

    def test_between_two_batches_of_a_card_lies_another_which_is_tried_beside_the_best(self) -> None:
        space = space_for(cuda())
        assert space.rungs("batch_size") == (16, 32, 64, 128, 256, 512)
        assert space.legal("batch_size") == (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
        assert space.beside("batch_size", 256) == (192, 384) and space.beside("batch_size", 16) == (24,)
        assert space.beside("batch_size", None) == ()
        assert {c["batch_size"] for c in islice(space.grid(), 20_000)} <= set(space.rungs("batch_size"))
        assert space.refusal({**space.baseline, "batch_size": 384}) is None
        # What a user asks for is asked for, and a CPU's launches differ too much.
        assert not space_for(cuda(), narrowed={"batch_size": (64, 96)}).further
        assert not space_for(cpu()).further and not space_for(cuda(), keep_batch_size=True).further

    @given(probes)
    def test_every_refusal_has_a_reason_and_the_baseline_is_legal(self, probe: Probe) -> None:
        if probe.dataset_samples is not None and probe.dataset_samples < probe.default_batch_size:
            with pytest.raises(UsageError, match="data set holds only"):
                space_for(probe)
            return
        space = space_for(probe)
        for name, choices in space.choices.items():
            for choice in choices:
                assert choice.refused is None or len(choice.refused) > 10
                config = {**space.baseline, "num_workers": 1, "prefetch_factor": 2, name: choice.value}
                if choice.refused is not None:
                    said = str(space.refusal(config))
                    assert f"{name}={spell(choice.value)}" in said and choice.refused in said
        for name, reason in space.inactive.items():
            assert len(reason) > 10
            assert reason in str(space.refusal({**space.baseline, name: 1}))
        assert space.choices.keys() | space.inactive.keys() >= KNOBS.keys()
        assert all(space.legal(name) for name in space.choices)
        assert space.refusal(space.baseline) is None

    def test_a_value_outside_the_space_is_refused(self) -> None:
        space = space_for(cpu())
        assert "not among" in str(space.refusal({**space.baseline, "batch_size": 33}))
        assert "unknown knob" in str(space.refusal({**space.baseline, "turbo": 1}))
        # True equals 1 in Python, but is another value for PyTorch.
        assert space.refusal({**space.baseline, "num_workers": True}) is not None

    def test_a_batch_larger_than_the_data_is_refused(self) -> None:
        space = space_for(cpu(dataset_samples=64))
        assert space.refusal({**space.baseline, "batch_size": 64}) is None
        assert "only 64 samples" in str(space.refusal({**space.baseline, "batch_size": 128}))
        assert all(int(config["batch_size"]) <= 64 for config in space.grid())

    def test_queues_that_do_not_fit_into_shared_memory_are_refused(self) -> None:
        # 2 workers hold 2 x (prefetch + 1) batches of 32 samples.
        fits = 2 * (4 + 1) * 32 * MIB
        config = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": False}

        def refusal(free: int) -> str | None:
            host = HOST.model_copy(update={"shm_free_bytes": free})
            space = build_space(cpu(sample_bytes=MIB), host, SpaceRequest())
            return space.refusal({**space.baseline, **config})

        assert refusal(fits) is None
        assert refusal(fits - 1) is not None
        assert "/dev/shm has 319 MiB" in str(refusal(fits - MIB)) and "--shm-size" in str(refusal(fits - MIB))

    def test_slots_take_no_shared_memory_but_for_the_first_batches(self) -> None:
        config = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": False}
        host = HOST.model_copy(update={"shm_free_bytes": 2 * 32 * MIB})
        space = build_space(cpu(sample_bytes=MIB), host, SpaceRequest())
        assert space.refusal({**space.baseline, **config, "batch_memory": "slots"}) is None
        assert "/dev/shm has 64 MiB" in str(space.refusal({**space.baseline, **config, "batch_memory": "fresh"}))

    def test_slots_are_for_batches_that_pytorch_makes(self) -> None:
        own = build_space(cpu(own_collate=True), HOST, SpaceRequest())
        assert "batch_memory" not in own.choices
        assert own.inactive["batch_memory"] == "batches are made by a function of its own"

    def test_workers_that_do_not_fit_into_memory_are_refused(self) -> None:
        host = HOST.model_copy(update={"available_bytes": 300 * MIB})
        space = build_space(cpu(sample_bytes=1000), host, SpaceRequest())
        one = {"num_workers": 1, "prefetch_factor": 2, "persistent_workers": False}
        assert space.refusal({**space.baseline, **one}) is None
        refusal = str(space.refusal({**space.baseline, **one, "num_workers": 2}))
        assert "300 MiB are free" in refusal and "--memory" in refusal

    def test_queues_that_need_too_many_open_files_are_refused(self) -> None:
        # 4 workers hold 4 x (8 + 1) batches, each of three tensors.
        fits = 4 * (8 + 1) * 3 + 64 + 3 * 4
        config = {"num_workers": 4, "prefetch_factor": 8, "persistent_workers": False}

        def refusal(open_files: int, **probe: Any) -> str | None:
            host = HOST.model_copy(update={"open_files": open_files})
            space = build_space(cpu(sample_tensors=3, **probe), host, SpaceRequest())
            return space.refusal({**space.baseline, **config})

        assert refusal(fits) is None
        assert f"{fits} files open" in str(refusal(fits - 1)) and "ulimit -n" in str(refusal(fits - 1))
        # Samples that cannot be stacked have a tensor each, for 32 samples.
        assert refusal(fits, varying_shapes=True) is not None
        assert refusal(4 * 9 * 3 * 32 + 64 + 12, varying_shapes=True) is None

    def test_a_configuration_without_workers_needs_no_resources_for_them(self) -> None:
        host = HOST.model_copy(update={"open_files": 10, "shm_free_bytes": 0, "available_bytes": 0})
        space = build_space(cpu(sample_bytes=MIB), host, SpaceRequest())
        assert space.refusal(space.baseline) is None
        assert {config["num_workers"] for config in space.grid()} == {0}


class TestRequest:
    def test_narrowing_does_not_change_the_baseline(self) -> None:
        space = space_for(cpu(), narrowed={"batch_size": (64, 128)})
        assert space.legal("batch_size") == (64, 128)
        assert space.baseline["batch_size"] == 32
        assert "not among" in str(space.refusal(space.baseline))
        assert key(space.baseline) not in {key(config) for config in space.grid()}

    def test_fixing_a_knob_pins_the_search_and_not_the_baseline(self) -> None:
        space = space_for(cpu(), fixed={"precision": "bf16", "intra_op_threads": 1})
        assert space.legal("precision") == ("bf16",) and space.legal("intra_op_threads") == (1,)
        assert space.baseline == space_for(cpu()).baseline
        assert {config["precision"] for config in space.grid()} == {"bf16"}

    @pytest.mark.parametrize(("pinned", "today"), [(4, 0), (0, 4)])
    def test_the_baseline_has_its_own_loader_outside_the_pinned_space(self, pinned: int, today: int) -> None:
        space = space_for(cpu(), fixed={"num_workers": pinned}, baseline={"num_workers": today})
        assert space.baseline["num_workers"] == today and ("prefetch_factor" in space.baseline) == (today > 0)
        assert {config["num_workers"] for config in space.grid()} == {pinned}

    def test_a_kept_batch_size_is_the_baselines(self) -> None:
        for asked in ({"batch_size": 48}, {"baseline": {"batch_size": 48}}):
            assert space_for(cpu(), keep_batch_size=True, **asked).legal("batch_size") == (48,)

    def test_a_stated_baseline_overrides_a_fixed_value(self) -> None:
        space = space_for(cpu(), fixed={"precision": "bf16"}, baseline={"precision": "fp32"})
        assert space.baseline["precision"] == "fp32" and space.legal("precision") == ("bf16",)

    def test_a_stated_batch_size_is_the_baselines_even_if_another_is_fixed(self) -> None:
        space = space_for(cpu(), fixed={"batch_size": 64}, batch_size=32)
        assert space.baseline["batch_size"] == 32 and space.legal("batch_size") == (64,)

    def test_fixing_no_workers_makes_their_settings_inactive(self) -> None:
        space = space_for(cpu(), fixed={"num_workers": 0})
        idle = {"prefetch_factor", "persistent_workers"}
        assert idle <= space.inactive.keys() and not idle & space.choices.keys()
        with pytest.raises(UsageError, match="prefetch_factor cannot be set here"):
            space_for(cpu(), fixed={"num_workers": 0, "prefetch_factor": 4})

    def test_an_illegal_value_is_refused_with_its_reason(self) -> None:
        with pytest.raises(UsageError, match=r"precision=fp16 .*CUDA"):
            space_for(cpu(), fixed={"precision": "fp16"})
        with pytest.raises(UsageError, match=r"precision=fp16 .*CUDA"):
            space_for(cpu(), narrowed={"precision": ("fp16", "tf32")})
        with pytest.raises(UsageError, match=r"baseline precision=fp16 .*CUDA"):
            space_for(cpu(), baseline={"precision": "fp16"})
        with pytest.raises(UsageError, match="pin_memory cannot be set here: needs a CUDA device"):
            space_for(cpu(), fixed={"pin_memory": True})

    def test_a_narrowed_knob_keeps_its_legal_values(self) -> None:
        space = space_for(cpu(), narrowed={"precision": ("fp16", "bf16")})
        assert space.legal("precision") == ("bf16",) and why_not(space, "precision", "fp16")

    def test_a_workloads_own_knobs_are_in_the_space(self) -> None:
        probe = cpu(workload_knobs={"depth": (2, 1, 3)})
        space = space_for(probe, narrowed={"workload.depth": (1, 3)})
        assert space.legal("workload.depth") == (1, 3) and space.baseline["workload.depth"] == 2
        with pytest.raises(UnknownNameError, match="width"):
            space_for(probe, fixed={"workload.width": "3"})

    def test_a_pinned_batch_that_the_data_cannot_fill_is_refused(self) -> None:
        with pytest.raises(UsageError, match="64 samples"):
            space_for(cpu(dataset_samples=64), fixed={"batch_size": 128})

    def test_same_batch_compares_batch_size_and_workload_knobs(self) -> None:
        space = space_for(cpu(workload_knobs={"depth": (2, 3)}))
        assert space.same_training({**space.baseline, "precision": "bf16"})
        assert not space.same_training({**space.baseline, "batch_size": 64})
        assert not space.same_training({**space.baseline, "workload.depth": 3})

    def test_a_knob_that_is_declared_to_change_only_the_speed_is_the_same_training(self) -> None:
        knobs = {"depth": (2, 3), "kernel": ("a", "b")}
        space = space_for(cpu(workload_knobs=knobs, workload_maths={"depth": True, "kernel": False}))
        assert space.same_training({**space.baseline, "workload.kernel": "b"})
        assert not space.same_training({**space.baseline, "workload.depth": 3})
        assert space.on_purpose == {"workload.depth"}


class TestGrid:
    def test_yields_every_legal_configuration_once(self) -> None:
        probe = cpu(dataset_samples=64, sample_bytes=MIB, workload_knobs={"blur": (False, True)})
        host = HOST.model_copy(update={"shm_free_bytes": 300 * MIB})
        narrowed = {"batch_size": (16, 64, 128), "intra_op_threads": (1, 2), "num_workers": (0, 1, 2)}
        space = build_space(probe, host, SpaceRequest(narrowed=narrowed))
        grid = list(space.grid())
        keys = [key(config) for config in grid]
        assert len(set(keys)) == len(keys)
        assert all(canonical(config) == config for config in grid)
        names = list(space.choices)
        offered = product(*([c.value for c in space.choices[n]] for n in names))
        legal = {key(c) for c in (dict(zip(names, vs, strict=True)) for vs in offered) if space.refusal(c) is None}
        assert set(keys) == legal
        refused = space.refusal({**space.baseline, "batch_size": 64, "num_workers": 2, "prefetch_factor": 4})
        assert "/dev/shm" in str(refused)

    def test_is_lazy(self) -> None:
        wide = {f"workload.k{i}": tuple(Choice(v) for v in range(10)) for i in range(30)}
        space = Space({"batch_size": (Choice(8),), **wide}, {}, {"batch_size": 8})
        assert next(space.grid())["batch_size"] == 8


def test_a_search_in_which_everything_compiles_knows_it() -> None:
    assert not space_for(cpu()).must_compile
    assert space_for(cpu(), narrowed={"compile_mode": ("default",)}).must_compile
    assert not space_for(cpu(), narrowed={"compile_mode": ("off", "default")}).must_compile


class TestGlobalBatch:
    def test_nothing_is_accumulated_unless_the_samples_of_a_step_are_stated(self) -> None:
        space = space_for(cpu())
        assert space.inactive["gradient_accumulation"] == "needs --global-batch"
        with pytest.raises(UsageError, match="gradient_accumulation cannot be set here: needs --global-batch"):
            space_for(cpu(), narrowed={"gradient_accumulation": (1, 2)})

    def test_the_batch_is_fixed_and_its_parts_are_searched(self) -> None:
        space = space_for(cpu(), batch_size=96, keep_batch_size=True, global_batch=96)
        assert space.legal("batch_size") == (96,)
        # The baseline takes the workload's own batch of 32 at once.
        assert space.baseline["gradient_accumulation"] == 3
        assert space.legal("gradient_accumulation") == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)
        assert all(space.same_training(config) for config in islice(space.grid(), 50))

    def test_parts_are_equal(self) -> None:
        stated = {"batch_size": 48, "keep_batch_size": True, "global_batch": 48}
        # As few parts as are no larger than the workload's own batch of 32.
        assert space_for(cpu(), **stated).baseline["gradient_accumulation"] == 2
        with pytest.raises(UsageError, match="gradient_accumulation=5 .* does not divide the batch into equal parts"):
            space_for(cpu(), **stated, fixed={"gradient_accumulation": 5})

    def test_what_is_run_today_is_searched_with_its_halves_and_doublings(self) -> None:
        stated = {"batch_size": 1000, "keep_batch_size": True, "global_batch": 1000}
        space = space_for(cpu(), **stated, baseline={"gradient_accumulation": 20})
        assert space.legal("gradient_accumulation") == (1, 2, 4, 5, 8, 10, 20, 40)


@pytest.mark.parametrize(("probe", "cores", "overlaps"), [(cpu(), 1, False), (cpu(), 2, True), (cuda(), 1, True)])
def test_on_one_core_nothing_loads_while_a_step_computes(probe: Probe, cores: int, overlaps: bool) -> None:
    assert build_space(probe, make_host(cores=cores), SpaceRequest()).overlaps == overlaps
