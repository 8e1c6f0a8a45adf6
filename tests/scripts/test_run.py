"""``autotune run``: a profile in somebody else's script, which stays as it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from autotune.agent.site import autotune_agent
from autotune.launcher import script_entry

from .conftest import SCRIPTS, Ran, Runner

BF16 = {"precision": "bf16", "memory_format": "channels_last", "optimizer_impl": "fused"}
LOADING = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}


@pytest.fixture(scope="module")
def all_set(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A script with all that can be set on a CPU."""
    return Runner(tmp_path_factory.mktemp("all")).script("train.py", **BF16, **LOADING)


@pytest.mark.slow
def test_all_that_can_be_set_is_set_and_said_in_one_line(all_set: Ran) -> None:
    ran, seen = all_set, all_set.seen
    assert (seen["workers"], seen["prefetch_factor"], seen["persistent_workers"]) == (2, 4, True)
    assert len(seen["loaded_by"]) == 2 and 0 not in seen["loaded_by"]
    assert seen["inside"] == ["torch.bfloat16"] and seen["outputs"] == ["torch.float32"]
    assert seen["channels_last"] and seen["fused"] is True and seen["foreach"] is False
    assert seen["threads"] == 1 and seen["samples"] == 96
    assert ran.stderr == (
        "autotune: profile.yaml: bf16, channels_last, 2 workers, prefetch 4, persistent workers, fused optimizer\n"
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The same without autotune."""
    one_thread = {"OMP_NUM_THREADS": "1"}
    return Runner(tmp_path_factory.mktemp("plain")).run([sys.executable, str(SCRIPTS / "train.py")], one_thread)


@pytest.mark.slow
def test_what_the_script_owns_stays_its_own(all_set: Ran, plain: Ran) -> None:
    seen = all_set.seen
    assert seen["evaluated"] == ["torch.float32"], "evaluations keep the script's precision"
    assert seen["keys"] == plain.seen["keys"]
    assert not seen["pickle"], "a saved model needs nothing of ours"
    assert seen["copied"] == 0.0, "a copy computes with weights of its own"
    assert not seen["environment"] and seen["path"] is None and not seen["child"]
    assert seen["call"] == plain.seen["call"], "calls of modules are as they were"
    assert seen["losses"] == pytest.approx(plain.seen["losses"], abs=0.05)


@pytest.mark.slow
def test_a_profile_of_defaults_changes_no_number(run: Runner, plain: Ran) -> None:
    ran = run.script("train.py")
    assert ran.seen["losses"] == plain.seen["losses"]
    assert ran.stderr == "autotune: profile.yaml: nothing to set\n"


@pytest.mark.slow
def test_what_is_not_safe_is_left_alone_with_its_reason(run: Runner) -> None:
    ran = run.script(
        "train.py",
        *("--autocast", "--stream", "--optimizer", "Adadelta"),
        **{"precision": "bf16", "compile_mode": "reduce-overhead", "batch_size": 16, "optimizer_impl": "fused"},
        **LOADING,
        **{"workload.depth": 3},
    )
    assert ran.seen["samples"] == 96 and (ran.seen["workers"], ran.seen["batch_size"]) == (0, 8)
    title, *parts = ran.stderr.rstrip("\n").split("; not ")
    assert title == "autotune: profile.yaml: nothing to set" and ran.stderr.count("\n") == 1
    assert set(parts) == {
        "bf16 (the script uses autocast itself)",
        "compile reduce-overhead (CUDA graphs overwrite outputs and gradients that a script may keep)",
        "batch 16 (the script's own is 8; put {batch_size} into its command)",
        "2 workers (an iterable data set may share its samples out by the number of workers)",
        "prefetch 4, not persistent workers (the loader has no workers)",
        "fused optimizer (Adadelta does not offer it)",
        "workload.depth=3 (it is a knob of a workload file)",
    }


@pytest.mark.slow
def test_what_the_script_decides_though_the_profile_has_nothing_else(run: Runner) -> None:
    ran = run.script("train.py", "--autocast", compile_mode="default", env={"TORCHDYNAMO_DISABLE": "1"})
    assert ran.stderr == (
        "autotune: profile.yaml: compile; precision is the script's own (the script uses autocast itself)\n"
    )


@pytest.mark.slow
def test_both_networks_of_a_gan_are_set(run: Runner) -> None:
    ran = run.script("gan.py", precision="bf16", optimizer_impl="fused")
    assert ran.seen == {"fused": [True, True], "generator": ["torch.bfloat16"], "discriminator": ["torch.bfloat16"]}
    assert ran.stderr == "autotune: profile.yaml: bf16, fused optimizer\n"


@pytest.mark.slow
def test_a_compiled_model_of_the_scripts_own_is_seen_through_by_its_compiler(run: Runner) -> None:
    """Its compiler takes the whole graph or fails: nothing of ours is in it."""
    wanted = {"precision": "bf16", "memory_format": "channels_last", "compile_mode": "default"}
    ran = run.script("train.py", "--compile", **wanted)
    assert ran.seen["inside"] == ["torch.bfloat16"] and ran.seen["channels_last"]
    assert ran.stderr == ("autotune: profile.yaml: bf16, channels_last; not compile (the script compiles itself)\n")


@pytest.mark.slow
@pytest.mark.parametrize("compiles", ["off", "default"])
def test_evaluations_with_gradients_and_exports_are_the_scripts_own(run: Runner, compiles: str) -> None:
    seen = run.script("train.py", "--grads", **BF16, compile_mode=compiles).seen
    assert seen["inside"] == ["torch.bfloat16"] and seen["evaluated"] == ["torch.float32"]


@pytest.mark.slow
def test_what_is_computed_again_in_the_backward_pass_is_no_model(run: Runner) -> None:
    ran = run.script("train.py", "--checkpoint", **BF16)
    assert ran.seen["inside"] == ["torch.bfloat16"]
    assert ran.stderr == "autotune: profile.yaml: bf16, channels_last, fused optimizer\n"


@pytest.mark.slow
def test_a_look_at_the_data_is_no_training_yet(run: Runner) -> None:
    ran = run.script("train.py", "--look", **LOADING)
    assert ran.seen["workers"] == 2 and ran.seen["samples"] == 96


@pytest.mark.slow
def test_accumulated_gradients_need_no_more(run: Runner) -> None:
    ran = run.script("train.py", "--accumulate", "2", **BF16)
    assert ran.seen["inside"] == ["torch.bfloat16"] and ran.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "persistent", "code"),
    [("save", False, 0), ("save", True, 0), ("evaluate", True, 0), ("go on", False, 1)],
)
def test_a_child_that_a_script_forks_in_mid_epoch_leaves_the_workers_alone(
    run: Runner, how: str, persistent: bool, code: int
) -> None:
    ran = run.script("forking.py", how, num_workers=2, prefetch_factor=2, persistent_workers=persistent, batch_size=4)
    assert ran.seen["epochs"] == [list(range(48))] * 2, "no batch is lost, and none goes to the child"
    assert ran.seen["makers"] == (2 if persistent else 4) and ran.seen["codes"] == [code] * 2
    refused = "it cannot go on with the epoch unless num_workers is 0"
    assert ran.stderr.count(refused) == (2 if code else 0)
    if not code:
        workers = "2 workers, persistent workers" if persistent else "2 workers"
        assert ran.stderr == f"autotune: profile.yaml: {workers}\n"


@pytest.mark.slow
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.stress)])
def test_a_compiled_model_trains_and_is_saved_as_it_was(run: Runner, real: bool) -> None:
    # Compiling takes half a minute.
    ran = run.script("train.py", env={} if real else {"TORCHDYNAMO_DISABLE": "1"}, compile_mode="default", **BF16)
    assert ran.seen["inside"] == ["torch.bfloat16"] and ran.seen["copied"] == 0.0 and not ran.seen["pickle"]
    assert "autotune: profile.yaml: bf16, compile, channels_last" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "persistent_workers", "said"),
    [
        ("shuffled", False, ""),
        ("shuffled", True, ""),
        ("parts", False, ""),
        ("parts", True, ""),
        ("drawn", False, ""),
        ("drawn", True, ""),
        ("counted", True, ""),
        ("nested", True, "the script begins another one before the last is over"),
        ("labels", True, "the script has changed dataset.labels"),
    ],
)
def test_a_script_trains_on_what_it_would_by_itself(
    run: Runner, kind: str, persistent_workers: bool, said: str
) -> None:
    """However it goes through its epochs: the same samples in the same order, and the same random numbers."""
    plain = run.run([sys.executable, str(SCRIPTS / "epochs_of_own.py"), kind])
    ran = run.script("epochs_of_own.py", kind, num_workers=1, prefetch_factor=2, persistent_workers=persistent_workers)
    assert plain.code == ran.code == 0 and ran.stdout == plain.stdout, ran
    assert said in ran.stderr and ran.stderr.count("\n") == (2 if said else 1)


@pytest.mark.stress
def test_workers_that_are_spawned_are_left_alone(run: Runner) -> None:
    ran = run.script("train.py", "--spawn", "--workers", "1", num_workers=2)
    assert len(ran.seen["loaded_by"]) == 4, "two in each of two epochs"
    assert ran.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_script_that_workers_would_run_again_gets_none(run: Runner) -> None:
    ran = run.script("unguarded.py", num_workers=2)
    assert ran.code == 0 and ran.stdout.split() == ["begins", "0"], ran
    assert (
        'not 2 workers (workers are not forked here, and the script has no `if __name__ == "__main__"`)' in ran.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("held", "said"),
    [
        ("file", "not 2 workers (the data set holds the open file 'holding.py' (dataset.held), and"),
        ("generator", "not 2 workers (the data set holds a generator of random numbers (dataset.held), and"),
        ("nothing", "2 workers"),
    ],
)
def test_a_data_set_that_workers_cannot_share_gets_none(run: Runner, held: str, said: str) -> None:
    ran = run.script("holding.py", held, num_workers=2)
    assert ran.code == 0 and said in ran.stderr, ran
    assert ran.stdout.split() == ["2" if held == "nothing" else "0"]


@pytest.mark.slow
def test_values_in_the_command(run: Runner) -> None:
    words = ["--batch-size", "{batch_size}", "--workers={num_workers}"]
    ran = run.script("train.py", *words, batch_size=16, num_workers=1, prefetch_factor=4)
    assert (ran.seen["batch_size"], ran.seen["workers"], ran.seen["prefetch_factor"]) == (16, 1, 4)
    assert ran.stderr == "autotune: profile.yaml: batch 16, 1 worker, prefetch 4\n"


def test_only_the_names_of_knobs_are_places(run: Runner) -> None:
    done = run(sys.executable, "-c", "import sys; print(sys.argv[1:])", '{"a": 1}', "{batch}", "{num_workers}")
    assert done.stdout == """['{"a": 1}', '{batch}', '0']\n"""


def test_options_of_the_command_are_its_own(run: Runner) -> None:
    done = run(sys.executable, "-c", "import sys; print(sys.argv[1:])", "--debug", "--help", "--profile", "x")
    assert done.stdout == "['--debug', '--help', '--profile', 'x']\n"


@pytest.mark.slow
def test_the_exit_code_is_the_scripts_own(run: Runner) -> None:
    assert run(sys.executable, "-c", "import sys; print('out'); sys.exit(7)").code == 7
    failing = run(sys.executable, "-c", "import torch; raise ValueError('mine')")
    assert failing.code == 1 and failing.stderr.rstrip().endswith("ValueError: mine")


def test_a_script_without_torch_runs_as_it_would(run: Runner) -> None:
    ran = run(sys.executable, "-c", "print(input('? '))")
    plain = run.run([sys.executable, "-c", "print(input('? '))"])
    assert (ran.code, ran.stdout, ran.stderr) == (plain.code, plain.stdout, plain.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_script(run: Runner, number: signal.Signals) -> None:
    words = run.command(sys.executable, str(SCRIPTS / "train.py"), "--kill")
    # A shell that starts something in the background lets it ignore Ctrl-C, and all that it starts.
    heard = partial(signal.signal, number, signal.SIG_DFL)
    with subprocess.Popen(words, cwd=run.folder, stdout=-1, stderr=-1, preexec_fn=heard) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"training\n"
        child.send_signal(number)
        try:
            child.communicate(timeout=60)
        finally:
            child.kill()
    # Where torch has been imported, Python ends by itself after a KeyboardInterrupt.
    assert child.returncode == (1 if number is signal.SIGINT else -number)


def test_a_closed_pipe_ends_what_writes_into_it(run: Runner) -> None:
    """As in a shell: what Python ignores in itself, its successor would ignore, too."""
    words = run.command("sh", "-c", "while :; do echo y; done")
    with subprocess.Popen(words, cwd=run.folder, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.stdout.close()
        assert child.wait(timeout=60) == -signal.SIGPIPE


#: As of a monitoring agent: it waits for torch, and leaves while Python asks one finder after the other, so that Python
#: skips the next one.
THEIRS = """
import sys

sys.OURS = True

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow
def test_a_sitecustomize_of_the_users_own_still_runs(run: Runner) -> None:
    own = run.folder / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text(THEIRS)
    show = (
        "import os, sys, sitecustomize; print(sys.OURS, sitecustomize.__file__, os.environ['PYTHONPATH'], sys.path[1])"
    )
    ran = run(sys.executable, "-c", show, env={"PYTHONPATH": str(own)})
    ours, file, path, first = ran.stdout.split()
    assert (ours, file, first) == ("True", str(own / "sitecustomize.py"), str(own))
    # Until something trains, children are let in.
    assert path == f"{script_entry.FOLDER}{os.pathsep}{own}"
    train = run(sys.executable, str(SCRIPTS / "train.py"), env={"PYTHONPATH": str(own)})
    assert train.seen["path"] == str(own)


@pytest.mark.slow
def test_a_script_below_a_script_is_entered(run: Runner) -> None:
    below = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, {str(SCRIPTS / 'train.py')!r}]))"
    ran = run(sys.executable, "-c", below, **BF16)
    assert ran.seen["inside"] == ["torch.bfloat16"] and ran.stderr.count("\n") == 1


@pytest.mark.slow
def test_ranks_are_set_and_one_of_them_says_so(run: Runner) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    words = [*torchrun, "--standalone", str(SCRIPTS / "train.py"), "--ddp"]
    ran = run(*words, env={"OMP_NUM_THREADS": "1"}, precision="bf16", memory_format="channels_last", num_workers=1)
    assert ran.seen["inside"] == ["torch.bfloat16"] and ran.seen["workers"] == 1
    (line,) = [line for line in ran.stderr.splitlines() if line.startswith("autotune")]
    assert line == (
        "autotune: profile.yaml: bf16, 1 worker; not channels_last (the model is inside DistributedDataParallel); "
        "intra_op_threads is the script's own (several processes share the cores)"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-program"], "there is no program 'no-such-program'"),
        (["/"], "'/' cannot be run: Permission denied"),
        (["python3", "-I", "train.py"], "with -I, Python ignores PYTHONPATH"),
        (["python3", "-uE", "train.py"], "with -E, Python ignores PYTHONPATH"),
        (["python3", "train.py", "{intra_op_threads}", "{optimizer_impl}"], "to put in the place of {optimizer_impl}"),
    ],
)
def test_what_cannot_run_is_one_sentence(run: Runner, words: list[str], message: str) -> None:
    ran = run(*words)
    assert ran.code == 2 and message in ran.stderr and "Traceback" not in ran.stderr


def test_options_of_python_that_are_no_obstacle() -> None:
    for words in (
        ["python", "-W", "error", "-X", "dev", "t.py", "-E"],
        ["python3.11", "-m", "a", "-I"],
        ["torchrun", "-I"],
    ):
        assert script_entry.deaf(words) is None
    assert script_entry.deaf(["python3", "-W", "error", "-I", "t.py"]) == "-I"


def test_both_sides_name_the_same_variable() -> None:
    assert autotune_agent.PLAN == script_entry.PLAN
    assert (script_entry.FOLDER / "sitecustomize.py").is_file()
    assert Path(autotune_agent.__file__).parent.parent == script_entry.FOLDER
