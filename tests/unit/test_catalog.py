"""Names and paths of models and objectives, and the hash of a workload's source."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import autotune
from autotune.base.errors import UnknownNameError, UsageError
from autotune.workload.catalog import (
    catalog_folder,
    declared_knobs,
    find_objective,
    find_workload,
    objective_names,
    source_hash,
    torchvision_names,
    workload_names,
)

PACKAGE = Path(autotune.__file__).parent


def run(code: str, *, cwd: Path | None = None) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_checkouts_catalogs_are_beside_the_package() -> None:
    assert catalog_folder("models") == PACKAGE.parent / "models"
    assert catalog_folder("objectives") == PACKAGE.parent / "objectives"


def test_a_wheels_catalogs_are_inside_the_package(tmp_path: Path) -> None:
    installed = tmp_path / "autotune"
    installed.mkdir()
    shutil.copy(PACKAGE / "__init__.py", installed)
    for package in ("base", "workload"):
        shutil.copytree(PACKAGE / package, installed / package)
    (installed / "_catalog" / "models").mkdir(parents=True)
    (installed / "_catalog" / "models" / "mine.py").write_text("")
    # A foreign folder of that name beside the package must be ignored.
    (tmp_path / "models").mkdir()
    code = "from autotune.workload import catalog; print(catalog.workload_names(), catalog.catalog_folder('models'))"
    assert run(code, cwd=tmp_path).split() == ["['mine']", str(installed / "_catalog" / "models")]


def test_a_catalog_name_is_its_file() -> None:
    found = find_workload("resnet50", {"k": "v"})
    assert (found.name, found.module, found.attribute, found.args) == ("resnet50", "resnet50", None, {"k": "v"})
    assert found.path == str(PACKAGE.parent / "models" / "resnet50.py")
    assert found.sha256 == source_hash(Path(found.path))


def test_a_torchvision_name_is_the_classifier_file_with_an_argument() -> None:
    found = find_workload("swin_t", {"k": "v"})
    assert (found.name, found.module) == ("swin_t", "torchvision_classifier")
    assert found.args == {"architecture": "swin_t", "k": "v"}
    assert found.path == str(PACKAGE.parent / "models" / "torchvision_classifier.py")
    assert "torchvision_classifier" not in workload_names()


def test_two_architectures_at_once_are_refused() -> None:
    with pytest.raises(UsageError, match="two models"):
        find_workload("swin_t", {"architecture": "resnet18"})


@pytest.mark.slow
def test_torchvision_names_are_those_that_it_registers() -> None:
    code = (
        "import json; from torchvision import models as m;"
        "print(json.dumps(sum((m.list_models(module=x) for x in (m, m.detection, m.segmentation)), [])))"
    )
    assert sorted(torchvision_names()) == sorted(json.loads(run(code)))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("retinanet_resnet50_fpn", "torchvision_detector"),
        ("lraspp_mobilenet_v3_large", "torchvision_segmenter"),
        # A file of its own goes before torchvision's name.
        ("fasterrcnn_resnet50_fpn", "fasterrcnn_resnet50_fpn"),
    ],
)
def test_detection_and_segmentation_models_have_files_of_their_own(name: str, file: str) -> None:
    assert find_workload(name, {}).module == file


def test_a_model_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "timm" or None)
    found = find_workload("timm:vit_tiny_patch16_224.augreg_in21k", {})
    assert (found.name, found.module) == ("timm:vit_tiny_patch16_224.augreg_in21k", "timm_classifier")
    assert found.args == {"architecture": "vit_tiny_patch16_224.augreg_in21k"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs timm"):
        find_workload("timm:resnet18", {})


def test_names_are_found_without_torch() -> None:
    finds = "import sys; from autotune.workload.catalog import find_workload; find_workload('vit_b_16', {});"
    assert run(f"{finds} print('torch' in sys.modules)").strip() == "False"


def test_a_module_reference_is_not_changed() -> None:
    found = find_workload("package.module:Net", {})
    assert (found.name, found.path, found.module, found.attribute) == ("Net", None, "package.module", "Net")
    assert found.sha256 == ""


@pytest.mark.parametrize("name", ["package.module:", ":Net", "a b:Net", "package..module:Net", "file.py:Net", "m:a.b"])
def test_malformed_module_references(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_workload(name, {})
    assert caught.value.advice


def test_an_unknown_model_suggests_the_closest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        find_workload("resnet5O", {})
    assert "resnet50" in caught.value.closest
    with pytest.raises(UnknownNameError) as caught:
        find_workload("torchvision_classifie", {})
    assert "torchvision_classifier" not in caught.value.closest


def test_a_forgotten_suffix_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownNameError) as caught:
        find_workload("mine", {})
    assert "mine.py" in str(caught.value.advice)
    with pytest.raises(UsageError) as missing:
        find_workload("./mine", {})
    assert str(tmp_path / "mine.py") in str(missing.value.advice)


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("mine.py", "./mine.py", "~/mine.py", str(tmp_path / "mine.py")):
        found = find_workload(name, {})
        assert (found.name, found.path, found.module) == ("mine", str(tmp_path / "mine.py"), "mine")


def test_a_linked_file_keeps_the_folder_of_its_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "other.py").write_text("")
    (tmp_path / "mine.py").symlink_to(tmp_path / "real" / "other.py")
    assert find_workload(str(tmp_path / "mine.py"), {}).path == str(tmp_path / "mine.py")


@pytest.mark.parametrize("name", ["gone.py", "folder.py", "two-words.py", "notes.txt"])
def test_paths_that_are_not_importable_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "two-words.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    for find in (lambda path: find_workload(path, {}), find_objective):
        with pytest.raises(UsageError) as caught:
            find(str(tmp_path / name))
        assert caught.value.advice


def test_objectives_are_found_by_name_and_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    assert find_objective(str(tmp_path / "mine.py")) == tmp_path / "mine.py"
    for name in objective_names():
        assert find_objective(name) == PACKAGE.parent / "objectives" / f"{name}.py"
    with pytest.raises(UnknownNameError, match="unknown objective 'nothing_like_it'"):
        find_objective("nothing_like_it")


class TestSourceHash:
    """Changes that the hash of a workload's source includes."""

    @pytest.fixture
    def project(self, tmp_path: Path) -> Path:
        files = {
            "train.py": "import os, torch, layers\nfrom blocks.attention import Head\ndef model():\n    import late\n",
            "layers.py": "from deep import thing\n",
            "deep.py": "import layers\n",
            "late.py": "",
            "blocks/__init__.py": "from . import norm\nfrom .mixing import *\n",
            "blocks/attention.py": "",
            "blocks/norm.py": "",
            "blocks/mixing.py": "",
            "plain/part.py": "",
            "blocks/unused.py": "",
            "unused.py": "",
            "data.txt": "",
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    @pytest.mark.parametrize(
        "name",
        [
            "train.py",
            "layers.py",
            "deep.py",
            "late.py",
            "blocks/__init__.py",
            "blocks/attention.py",
            "blocks/norm.py",
            "blocks/mixing.py",
        ],
    )
    def test_includes_what_is_imported(self, project: Path, name: str) -> None:
        before = source_hash(project / "train.py")
        with (project / name).open("a") as stream:
            stream.write("# changed\n")
        assert source_hash(project / "train.py") != before

    @pytest.mark.parametrize("name", ["unused.py", "blocks/unused.py", "data.txt"])
    def test_ignores_what_is_not_imported(self, project: Path, name: str) -> None:
        before = source_hash(project / "train.py")
        (project / name).write_text("# changed\n")
        assert source_hash(project / "train.py") == before

    def test_follows_folders_without_init(self, project: Path) -> None:
        (project / "train.py").write_text("from plain.part import thing\n")
        before = source_hash(project / "train.py")
        (project / "plain" / "part.py").write_text("thing = 1\n")
        assert source_hash(project / "train.py") != before

    def test_depends_on_the_folders_content_and_not_on_its_name(self, project: Path, tmp_path: Path) -> None:
        before = source_hash(project / "train.py")
        moved = shutil.copytree(project, tmp_path / "elsewhere")
        assert source_hash(moved / "train.py") == before
        (moved / "train.py").rename(moved / "other.py")
        assert source_hash(moved / "other.py") != before

    def test_stays_inside_the_folder(self, project: Path) -> None:
        inner = project / "blocks" / "attention.py"
        inner.write_text("from .. import layers\n")
        before = source_hash(inner)
        (project / "layers.py").write_text("# changed\n")
        assert source_hash(inner) == before

    @pytest.mark.parametrize(
        "text", [b"def (:\n", b"\x00", b"\xff\xfe", b"x = '\\d'\n", b"(" * 5000, b"-" * 100_000 + b"1"]
    )
    def test_takes_any_bytes(self, tmp_path: Path, text: bytes) -> None:
        file = tmp_path / "broken.py"
        file.write_bytes(text)
        first = source_hash(file)
        file.write_bytes(text + b"\n#")
        assert source_hash(file) != first


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("KNOBS = {'deep': (2, 4), 'blur': [False, True]}", {"deep": (2, 4), "blur": (False, True)}),
        ("KNOBS: dict = {'mode': knob('a', 'b', changes_maths=False)}", {"mode": ("a", "b")}),
        ("KNOBS = {'deep': range(3), 'wide': WIDTHS}", {"deep": (), "wide": ()}),
        ("KNOBS = {}", {}),
        ("KNOBS = dict(deep=(1, 2))", None),
        ("KNOBS = {**OTHERS}", None),
        ("KNOBS = {'deep': (2, 4)}\ndef model(ctx):\n    return KNOBS", {"deep": (2, 4)}),
        ("KNOBS = {'deep': (2, 4)}\nKNOBS |= {'wide': (1, 2)}", None),
        ("KNOBS = {'deep': (2, 4)}\nKNOBS['wide'] = (1, 2)", None),
        ("KNOBS = {'deep': (2, 4)}\nif BIG:\n    KNOBS.update(wide=(1, 2))", None),
        ("A = 1", None),
        ("KNOBS = {", None),
    ],
)
def test_the_knobs_of_a_file_are_read_without_running_it(source, found, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"{source}\nraise SystemExit\n" if source.count("{") == source.count("}") else source)
    assert declared_knobs(file) == found
    assert declared_knobs(tmp_path / "nothing.py") is None
