"""The user's own image folders, refusals of bad ones, and synthetic data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune.base.errors import WorkloadError
from autotune.workload.data import sets as data


def image_folder(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(path.encode())
    return root


def test_a_folder_of_classes_is_accepted_at_any_depth_and_in_any_case(tmp_path: Path) -> None:
    ref = data.folder(image_folder(tmp_path, "cat/1.jpg", "dog/deep/er/2.JPEG", "owl/3.Png", "owl/notes.txt"))
    assert (ref.kind, ref.path, ref.epoch_samples) == ("folder", str(tmp_path), None)
    assert ref.identity


def test_a_relative_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_folder(tmp_path / "set", "cat/1.jpg")
    monkeypatch.chdir(tmp_path)
    assert data.folder(Path("set")).path == str(tmp_path / "set")


def test_identity_depends_only_on_names_and_sizes(tmp_path: Path) -> None:
    first = data.folder(image_folder(tmp_path / "a", "cat/1.jpg", "dog/2.jpg")).identity
    second = image_folder(tmp_path / "b", "dog/2.jpg", "cat/1.jpg", "cat/notes.txt")
    assert data.folder(second).identity == first
    (second / "cat/1.jpg").write_bytes(b"another size")
    resized = data.folder(second).identity
    (second / "cat/1.jpg").rename(second / "cat/9.jpg")
    renamed = data.folder(second).identity
    (second / "cat").rename(second / "cow")
    assert len({first, resized, renamed, data.folder(second).identity}) == 4


def test_a_huge_folder_is_sampled_for_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_SIZED_FILES", 8)
    image_folder(tmp_path, *(f"{name}/{number:02d}.jpg" for name in ("cat", "dog") for number in range(16)))
    before = data.folder(tmp_path).identity
    (tmp_path / "cat/01.jpg").write_bytes(b"not among those whose size is asked")
    assert data.folder(tmp_path).identity == before
    (tmp_path / "cat/04.jpg").write_bytes(b"one in four is")
    sized = data.folder(tmp_path).identity
    (tmp_path / "cat/01.jpg").unlink()
    assert len({before, sized, data.folder(tmp_path).identity}) == 3


def test_a_dangling_link_among_good_images_is_accepted(tmp_path: Path) -> None:
    image_folder(tmp_path, "cat/1.jpg")
    before = data.folder(tmp_path).identity
    (tmp_path / "cat/2.jpg").symlink_to(tmp_path / "gone.jpg")
    assert data.folder(tmp_path).identity != before


@pytest.mark.parametrize(
    "links",
    [
        # Ten folders that all link to each other have millions of paths.
        {f"cat/{a}/to_{b}": f"cat/{b}" for a in range(10) for b in range(10) if a != b},
        {"cat/loop": "."},
        {"cat/itself": "cat"},
        {"cat/again": "cat/0"},
    ],
    ids=["mesh", "up", "itself", "twice"],
)
def test_links_that_lead_back_are_refused(tmp_path: Path, links: dict[str, str]) -> None:
    image_folder(tmp_path, *(f"cat/{number}/1.jpg" for number in range(10)), "dog/1.jpg")
    for link, target in links.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    with pytest.raises(WorkloadError, match="contains already, under another name") as caught:
        data.folder(tmp_path)
    assert str(tmp_path / "cat") in str(caught.value) and "remove the link" in str(caught.value.advice)


def test_links_that_lead_elsewhere_are_followed(tmp_path: Path) -> None:
    image_folder(tmp_path, "store/1.jpg", "set/cat/2.jpg")
    before = data.folder(tmp_path / "set").identity
    # Two classes may share a folder.
    for name in ("cat/more", "dog"):
        (tmp_path / "set" / name).symlink_to(tmp_path / "store")
    assert data.folder(tmp_path / "set").identity != before


def test_bad_folders_are_refused_in_one_sentence_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file.jpg").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    image_folder(tmp_path / "flat", "1.jpg", "2.png")
    image_folder(tmp_path / "text", "cat/notes.txt")
    image_folder(tmp_path / "mixed", "cat/1.jpg", "dog/notes.txt")
    for name, said in {
        "nowhere": "there is no folder",
        "file.jpg": "is a file, not a folder",
        "empty": "holds no class folders",
        "flat": "holds images directly and no class folders",
        "text": "class folders without an image .*: cat",
        "mixed": "class folders without an image .*: dog",
    }.items():
        with pytest.raises(WorkloadError, match=said) as caught:
            data.folder(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert caught.value.advice is not None
        assert caught.value.exit_code == 4


@pytest.mark.parametrize("closed", [".", "cat", "cat/deep"])
def test_a_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str) -> None:
    image_folder(tmp_path, "cat/1.jpg", "cat/deep/2.jpg")
    real = os.scandir

    # Permissions do not apply to root, the usual user in containers, so the error is injected.
    def scandir(path: str | Path) -> object:
        if Path(path) == tmp_path / closed:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(WorkloadError, match="Permission denied") as caught:
        data.folder(tmp_path)
    assert str(tmp_path / closed) in str(caught.value)
    assert caught.value.advice == "make the folder readable for this user."


def test_synthetic_data_has_no_folder() -> None:
    ref = data.synthetic()
    assert (ref.kind, ref.path, ref.epoch_samples) == ("synthetic", None, None)


@pytest.mark.parametrize("made", ["a pipe", "a loop"])
def test_what_a_training_could_not_read_to_its_end_is_refused(tmp_path: Path, made: str) -> None:
    image_folder(tmp_path, "cat/1.jpg")
    if made == "a pipe":
        os.mkfifo(tmp_path / "cat/2.jpg")
    else:
        (tmp_path / "cat/again").symlink_to(tmp_path / "cat")
        (tmp_path / "cat/and-again").symlink_to(tmp_path / "cat")
    with pytest.raises(
        WorkloadError, match="named like an image" if made == "a pipe" else "under another name"
    ) as refused:
        data.folder(tmp_path)
    assert refused.value.advice
