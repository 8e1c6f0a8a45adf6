"""What is in force under a profile, in a script as it stands and in a training that is prepared as trials are: the
same."""

from __future__ import annotations

import sys

import pytest

from autotune.base.records import Value
from autotune.knobs import KNOBS

from .conftest import SCRIPTS, Runner, written

#: Values of knobs that a script can be given on a CPU, so that each knob has two of them somewhere.
TOGETHER: dict[str, tuple[int, dict[str, Value]]] = {
    "all": (
        4,
        {
            **{"precision": "bf16", "memory_format": "channels_last", "optimizer_impl": "fused"},
            **{"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True, "intra_op_threads": 2},
            **{"cudnn_benchmark": True, "malloc": "keep", "batch_memory": "slots"},
        },
    ),
    "compiled": (
        4,
        {"compile_mode": "default", "optimizer_impl": "foreach", "num_workers": 1, "prefetch_factor": 2,
         "persistent_workers": False, "batch_memory": "fresh"},
    ),
    "plain": (
        4,
        {"optimizer_impl": "for-loop", "memory_format": "contiguous", "cudnn_benchmark": False, "malloc": "default"},
    ),
    "volumes": (5, {"precision": "bf16", "memory_format": "channels_last_3d"}),
}  # fmt: skip
#: Knobs that a script sets itself, or that need a card or several ranks.
NOT_HERE = {
    *("batch_size", "gradient_accumulation", "deterministic", "pin_memory", "non_blocking", "alloc_conf"),
    *("broadcast_buffers", "ddp_bucket_cap_mb", "gradient_as_bucket_view", "gradient_compression", "static_graph"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_a_script_and_a_prepared_training_have_the_same_in_force(run: Runner, name: str) -> None:
    dimensions, configuration = TOGETHER[name]
    ran = run.script("both_paths.py", str(dimensions), **configuration)
    profile = written(run.folder, **configuration)
    own = run.run([sys.executable, str(SCRIPTS / "both_paths.py"), str(dimensions), str(profile)])
    assert "; not " not in ran.stderr, ran.stderr
    assert ran.seen == own.seen
    assert ran.seen["keeps memory"] == (configuration.get("malloc") == "keep")
    if name == "all":
        assert ran.seen["computes in"] == "torch.bfloat16" and ran.seen["images"] and ran.seen["weights"]
        assert ran.seen["collate"] == "collate_in_slots"


def test_every_knob_is_in_it_or_left_out_with_a_reason() -> None:
    tried = {knob for _, configuration in TOGETHER.values() for knob in configuration}
    assert tried | NOT_HERE == set(KNOBS) and not tried & NOT_HERE
