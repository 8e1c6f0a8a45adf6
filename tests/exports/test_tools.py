"""Each tool reads what is exported for it. A tool that is not installed (extra ``exports``) is skipped; the names of
options are checked in any case."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from autotune.base.errors import UsageError
from autotune.knobs.alloc_conf import VARIABLES as ALLOCATOR
from autotune.profile.export import FORMATS

from .profiles import CPU, CUDA, DEADLINE_S, answer_of, profile_with

#: Options that concern these knobs, of timm's ``train.py``, which is in its repository and not in the package (1.0).
TIMM = {
    *("model", "batch_size", "channels_last", "grad_accum_steps", "torchcompile", "torchcompile_mode", "device"),
    *("amp", "amp_dtype", "workers", "pin_mem", "opt_kwargs", "no_prefetcher", "lr", "lr_base"),
}
#: Parameters of `composer.Trainer` 0.32.1 that concern these knobs.
COMPOSER = {"device", "precision", "device_train_microbatch_size", "deterministic_mode", "compile_config"}
#: Options of torchvision 0.21's references, of all three ``train.py`` alike.
TORCHVISION = ("--model", "--device", "--batch-size", "--workers", "--amp", "--use-deterministic-algorithms")


def needs(*tools: str) -> pytest.MarkDecorator:
    missing = [tool for tool in tools if importlib.util.find_spec(tool) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed (extra: exports)")


def exported(name: str, config: dict, folder: Path, *, model: str = "resnet50") -> Path:
    file = folder / f"{name}.out"
    file.write_text(FORMATS[name].export(profile_with(config, model=model)).text)
    return file


def test_yaml_and_json_are_profiles(tmp_path: Path) -> None:
    code = "import sys, json, autotune; print(json.dumps([autotune.load_profile(f).config for f in sys.argv[1:]]))"
    files = [str(exported(name, CPU, tmp_path)) for name in ("yaml", "json")]
    assert answer_of(code, *files, folder=tmp_path) == [CPU, CPU]
    assert json.loads(Path(files[1]).read_text())["configuration"] == CPU


def test_a_shell_reads_env(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    hostile = 'it\'s $HOME `id` "x"\n#'
    text = FORMATS["env"].export(profile_with({**CPU, "workload.name": hostile})).text
    shown = 'eval "$1"; env -0'
    done = subprocess.run(["bash", "-c", shown, "bash", text], capture_output=True, text=True, check=True)
    found = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
    assert found["AUTOTUNE_BATCH_SIZE"] == "64" and found["AUTOTUNE_PERSISTENT_WORKERS"] == "true"
    assert found["OMP_NUM_THREADS"] == found["MKL_NUM_THREADS"] == "2"
    assert found["AUTOTUNE_WORKLOAD_NAME"] == hostile
    cuda = FORMATS["env"].export(profile_with(CUDA)).text
    assert "export PYTORCH_ALLOC_CONF=expandable_segments:True\n" in cuda
    # Nor does it depend on the shell in which it is written.
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,garbage_collection_threshold:0.8")
    assert FORMATS["env"].export(profile_with(CUDA)).text == cuda


def test_argparse_reads_args() -> None:
    parser = argparse.ArgumentParser()
    for name, value in CPU.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(flag, type=type(value))
    for config in (CPU, {**CPU, "persistent_workers": False}):
        line = FORMATS["args"].export(profile_with(config)).text
        assert vars(parser.parse_args(line.split())) == config


def test_args_by_the_words_of_a_script() -> None:
    maps = {"batch_size": "-b {batch_size}", "precision:bf16": "--amp --dtype bf16", "num_workers": "-j{num_workers}"}
    made = FORMATS["args"].export(profile_with(CPU), maps)
    assert made.text == "-b 64 --amp --dtype bf16 -j2\n"
    notes = "\n".join(made.notes)
    assert "prefetch_factor=4 has no words" in notes and "batch_size=64 has no words" not in notes
    # A profile of a script has its own, and says what the script does without them.
    own = profile_with(CPU, flags={"batch_size": "-b {batch_size}", "precision:fp16": "--half"}, own={"num_workers": 2})
    made = FORMATS["args"].export(own)
    notes = "\n".join(made.notes)
    assert made.text == "-b 64\n" and "precision=bf16 has no words" in notes and "num_workers=2" not in notes


@pytest.mark.slow
@needs("timm")
def test_timm(tmp_path: Path) -> None:
    told = yaml.safe_load(exported("timm", CPU, tmp_path, model="timm:resnet18").read_text())
    assert told.keys() <= TIMM
    assert told["model"] == "resnet18" and told["device"] == "cpu" and told["batch_size"] == 64
    assert (told["amp"], told["amp_dtype"], told["channels_last"]) == (True, "bfloat16", True)
    cuda = yaml.safe_load(exported("timm", CUDA, tmp_path).read_text())
    assert cuda.keys() <= TIMM and (cuda["batch_size"], cuda["grad_accum_steps"]) == (32, 3)
    assert (cuda["torchcompile"], cuda["torchcompile_mode"], cuda["pin_mem"]) == ("inductor", "default", True)
    # ``train.py`` passes these on as they are.
    code = (
        "import sys, json, torch, timm.optim; told = json.loads(sys.argv[1]);"
        "made = timm.optim.create_optimizer_v2(torch.nn.Linear(2, 2), opt='sgd', lr=0.1, **told);"
        "print(json.dumps([made.param_groups[0][name] for name in ('fused', 'foreach')]))"
    )
    assert answer_of(code, json.dumps(told["opt_kwargs"]), folder=tmp_path) == [True, False]


@pytest.mark.slow
@needs("accelerate")
def test_accelerate(tmp_path: Path) -> None:
    file = exported("accelerate", {**CPU, "compile_mode": "default"}, tmp_path)
    script = tmp_path / "train.py"
    script.write_text(
        "import json\nfrom accelerate import Accelerator\nmade = Accelerator()\nplugin = made.state.dynamo_plugin\n"
        "print(json.dumps([made.mixed_precision, str(made.device), plugin.backend.value, plugin.mode]))\n"
    )
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(file),
        str(script),
    ]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["bf16", "cpu", "INDUCTOR", "default"]
    text = file.read_text()
    assert "batch_size=64, drop_last=True" in text and "--num_cpu_threads_per_process 2" in text


@pytest.mark.slow
@needs("transformers", "accelerate")
def test_transformers(tmp_path: Path) -> None:
    code = (
        "import sys, json, dataclasses\nfrom transformers import HfArgumentParser, TrainingArguments\n"
        "(told,) = HfArgumentParser(TrainingArguments).parse_json_file(sys.argv[1])\n"
        "known = [f.name for f in dataclasses.fields(TrainingArguments)]\n"
        "print(json.dumps([{n: getattr(told, n) for n in json.load(open(sys.argv[1]))}, known]))\n"
    )
    file = exported("transformers", {**CPU, "batch_size": 64, "gradient_accumulation": 4}, tmp_path)
    told, known = answer_of(code, str(file), folder=tmp_path)
    assert told == json.loads(file.read_text())
    assert (told["per_device_train_batch_size"], told["gradient_accumulation_steps"]) == (16, 4)
    assert told["bf16"] and told["dataloader_drop_last"] and told["dataloader_multiprocessing_context"] == "fork"
    cuda = json.loads(exported("transformers", CUDA, tmp_path).read_text())
    assert cuda.keys() <= set(known) and cuda["accelerator_config"] == {"non_blocking": True}
    assert cuda["torch_compile"] and cuda["tf32"] is False and not cuda["use_cpu"]


@pytest.mark.slow
@needs("transformers")
def test_a_compiler_can_ask_for_the_precision_that_the_trainer_has_set(tmp_path: Path) -> None:
    """It asks where it chooses among kernels, and PyTorch refuses the answer if it was set by backend alone."""
    exported = FORMATS["transformers"].export(profile_with({**CUDA, "precision": "tf32"}))
    assert json.loads(exported.text)["tf32"] is True
    (told,) = (note for note in exported.notes if "precision=tf32: call " in note)
    call = told.partition("call ")[2].partition(" once TrainingArguments are made")[0]
    code = (
        "import json, torch\nfrom transformers.utils.import_utils import enable_tf32\nenable_tf32(True)\n"
        f"{call}\nprint(json.dumps(torch.get_float32_matmul_precision()))\n"
    )
    assert answer_of(code, folder=tmp_path) == "high"
    eager = FORMATS["transformers"].export(profile_with({**CUDA, "precision": "tf32", "compile_mode": "off"}))
    assert not any("precision=tf32" in note for note in eager.notes)


@pytest.mark.slow
@needs("lightning")
def test_lightning(tmp_path: Path) -> None:
    code = (
        "import sys, json, inspect, torch, yaml\nfrom lightning import Trainer\n"
        "told = yaml.safe_load(open(sys.argv[1]))\ntrainer = Trainer(logger=False, **told['trainer'])\n"
        "loader = torch.utils.data.DataLoader(list(range(99)), **told['dataloader'])\n"
        "print(json.dumps([trainer.precision, trainer.accumulate_grad_batches, type(trainer.accelerator).__name__,"
        " loader.batch_size, loader.num_workers, loader.prefetch_factor, loader.drop_last,"
        " loader.multiprocessing_context.get_start_method(), list(inspect.signature(Trainer).parameters)]))\n"
    )
    file = exported("lightning", {**CPU, "gradient_accumulation": 2}, tmp_path)
    *told, known = answer_of(code, str(file), folder=tmp_path)
    assert told == ["bf16-mixed", 2, "CPUAccelerator", 32, 2, 4, True, "fork"]
    cuda = yaml.safe_load(exported("lightning", CUDA, tmp_path).read_text())
    assert cuda["trainer"].keys() <= set(known) and cuda["trainer"]["precision"] == "16-mixed"
    assert cuda["trainer"]["benchmark"] is True and cuda["dataloader"]["pin_memory"] is True


@needs("deepspeed")
def test_deepspeed(tmp_path: Path) -> None:
    code = (
        "import sys, json\nfrom deepspeed.runtime.config import DeepSpeedConfig\nfound = []\n"
        "for file in sys.argv[1:]:\n    c = DeepSpeedConfig(file)\n"
        "    found.append([c.train_batch_size, c.train_micro_batch_size_per_gpu, c.gradient_accumulation_steps,"
        " c.torch_autocast_enabled, str(c.torch_autocast_dtype), c.dataloader_drop_last])\nprint(json.dumps(found))\n"
    )
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file, config in zip(files, (CPU, CUDA), strict=True):
        file.write_text(FORMATS["deepspeed"].export(profile_with(config)).text)
    found = answer_of(code, *map(str, files), folder=tmp_path)
    assert found == [[64, 64, 1, True, "torch.bfloat16", True], [96, 32, 3, True, "torch.float16", True]]


def test_torchvisions_reference_scripts() -> None:
    parser = argparse.ArgumentParser()
    for option in TORCHVISION:
        switch = option in ("--amp", "--use-deterministic-algorithms")
        parser.add_argument(option, **({"action": "store_true"} if switch else {}))
    line = FORMATS["torchvision"].export(profile_with(CUDA)).text
    told = parser.parse_args(line.split())
    assert (told.model, told.device, told.batch_size, told.workers, told.amp) == ("resnet50", "cuda", "96", "8", True)
    # Those of detection do not pin, and do not turn the benchmark on.
    detection = FORMATS["torchvision"].export(profile_with(CUDA, model="fasterrcnn_resnet50_fpn"))
    assert "pin_memory=true: the script has it off" in "\n".join(detection.notes)
    with pytest.raises(UsageError, match="no bf16"):
        FORMATS["torchvision"].export(profile_with(CPU))


@needs("hydra")
def test_hydra(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data:\n  batch_size: 1\n")
    code = (
        "import sys, json, hydra\nfrom omegaconf import OmegaConf\n"
        "with hydra.initialize_config_dir(sys.argv[1], version_base=None):\n"
        "    made = hydra.compose('config', overrides=sys.argv[2:])\n"
        "print(json.dumps(OmegaConf.to_container(made)))\n"
    )
    hostile = "it's \\' a=b, [c] \"x\" \\"
    config = {**CPU, "workload.name": hostile, "workload.flag": "true"}
    words = shlex.split(FORMATS["hydra"].export(profile_with(config)).text)
    found = answer_of(code, str(tmp_path), *words, folder=tmp_path)["autotune"]
    assert found.pop("workload") == {"name": hostile, "flag": "true"} and found == CPU
    mapped = FORMATS["hydra"].export(profile_with(CPU), {"batch_size": "data.batch_size={batch_size}"})
    found = answer_of(code, str(tmp_path), *shlex.split(mapped.text), folder=tmp_path)
    assert found == {"data": {"batch_size": 64}} and any("num_workers=2 has no words" in n for n in mapped.notes)


def test_composer(tmp_path: Path) -> None:
    """Its pins exclude recent versions of PyTorch, so the names are those read in its source."""
    known = set(COMPOSER)
    if importlib.util.find_spec("composer") is not None:
        code = "import inspect, json, composer; print(json.dumps(list(inspect.signature(composer.Trainer).parameters)))"
        known = set(answer_of(code, folder=tmp_path))
    for config in (CPU, CUDA):
        told = yaml.safe_load(exported("composer", config, tmp_path).read_text())
        assert told["trainer"].keys() <= known
    assert told["trainer"]["precision"] == "amp_fp16" and told["trainer"]["compile_config"] == {"mode": "default"}
    assert told["trainer"]["device_train_microbatch_size"] == 32 and told["dataloader"]["batch_size"] == 96
