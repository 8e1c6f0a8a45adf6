"""Which CUDA a driver runs."""

import pytest

from autotune.machine.cuda import VERSIONS, newest_cuda, torch_versions, trouble


@pytest.mark.parametrize(
    ("driver", "major"),
    [("580.95.05", 13), ("610.10", 13), ("575.64", 12), ("525.60.13", 12), ("470.256", 11), ("390.157", None)],
)
def test_a_driver_runs_all_minor_versions_of_what_it_runs(driver, major):
    newest = newest_cuda(driver)
    assert (newest.major if newest else None) == major
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
    assert "does not support compute capability 7.0" in volta and "for CUDA 12 (cu126" in volta
    assert trouble("12.6", "580.95.05", (7, 0)) is None
    assert trouble("13.2", "580.95.05", (7, 5)) is None


@pytest.mark.parametrize(("cuda", "driver"), [("14.0", "580.95.05"), ("13.2", "unknown")])
def test_what_is_not_known_is_no_trouble(cuda, driver):
    assert trouble(cuda, driver) is None


def test_torchs_versions_are_read_without_importing_it():
    import importlib.metadata

    version, cuda = torch_versions()
    assert version.partition("+")[0] == importlib.metadata.version("torch").partition("+")[0]
    assert cuda is None or cuda.partition(".")[0].isdigit()
