"""Which CUDA a driver runs."""

import pytest

from autotune.machine.host import VERSIONS, fitting, torch_versions, trouble


@pytest.mark.parametrize(
    ("driver", "major"),
    [("580.95.05", 13), ("610.10", 13), ("575.64", 12), ("525.60.13", 12), ("470.256", 11), ("390.157", None)],
)
def test_a_driver_runs_all_minor_versions_of_what_it_runs(driver, major):
    newest = fitting(driver, None)
    assert ({v.major for v in newest}) == ({major} if major else set())
    for version in VERSIONS:
        runs = major is not None and version.major <= major
        assert (trouble(f"{version.major}.9", driver) is None) is runs


def test_the_sentence_names_the_driver_that_is_needed_and_the_wheel_that_fits():
    old = trouble("13.2", "535.129.03")
    assert "CUDA 13.2 needs driver 580 or newer" in old and "for CUDA 12 (cu126" in old
    assert "no torch wheel" in trouble("13.2", "390.157")
    assert "built without CUDA" in trouble(None, "580.95.05") and "cu130" in trouble(None, "580.95.05")


def test_an_old_card_needs_an_old_cuda_whatever_the_driver():
    """CUDA 13 has no kernels for Volta, and its driver has."""
    volta = trouble("13.2", "580.95.05", (7, 0))
    assert "has no kernels for compute capability 7.0" in volta and "for CUDA 12 (cu126" in volta
    assert trouble("12.6", "580.95.05", (7, 0)) is None
    assert trouble("13.2", "580.95.05", (7, 5)) is None


@pytest.mark.parametrize(
    ("cuda", "card", "fits"),
    [
        # Blackwell needs CUDA 12.8, which no longer knows Maxwell and Pascal.
        ("12.6", (12, 0), "cu132 or cu130"),
        ("12.8", (12, 0), None),
        ("12.8", (6, 1), "CUDA 12 (cu126 up to torch 2.14)"),
        ("12.6", (6, 1), None),
        ("12.8", (7, 0), "CUDA 12 (cu126 up to torch 2.14)"),
        ("13.2", (12, 1), None),
        ("11.8", (9, 0), None),
    ],
)
def test_the_minor_version_decides_on_the_cards(cuda, card, fits):
    found = trouble(cuda, "580.95.05", card)
    assert found is None if fits is None else fits in found


def test_a_container_may_bring_a_newer_library_than_the_driver_outside():
    assert trouble("13.2", "535.129.03", (9, 0)) is not None
    assert trouble("13.2", "535.129.03", (9, 0), library=(13, 0)) is None
    assert trouble("13.2", "535.129.03", (9, 0), library=(12, 2)) is not None
    assert trouble("12.6", "580.95.05", library=(13, 0)) is None


def test_an_old_library_is_what_torch_loads_whatever_the_driver():
    found = trouble("13.2", "580.95.05", (9, 0), library=(12, 2))
    assert "CUDA 12.2, older than the driver" in found and "cuda-compat" in found


@pytest.mark.parametrize(("cuda", "driver"), [("14.0", "580.95.05"), ("13.2", "unknown")])
def test_what_is_not_known_is_no_trouble(cuda, driver):
    assert trouble(cuda, driver) is None


def test_torchs_versions_are_read_without_importing_it():
    import importlib.metadata

    version, cuda = torch_versions()
    assert version.partition("+")[0] == importlib.metadata.version("torch").partition("+")[0]
    assert cuda is None or cuda.partition(".")[0].isdigit()
