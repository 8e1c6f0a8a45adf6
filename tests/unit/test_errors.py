"""Exit codes and error classes correspond, and are described in one place."""

import signal

import pytest

from autotune.base import errors
from autotune.base.errors import AutotuneError, InterruptedSearch, by_exit_code

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, AutotuneError)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_an_error_can_be_restored_from_its_exit_code(kind: type[AutotuneError]) -> None:
    error = by_exit_code(kind.exit_code)("what happened", advice="what to change")
    assert isinstance(error, AutotuneError) and error.exit_code == kind.exit_code
    # Two classes share a code only if one is a special case of the other.
    assert issubclass(kind, type(error))
    assert (str(error), error.advice) == ("what happened", "what to change")


@pytest.mark.parametrize("code", [None, 0, 1, -9, 124])
def test_an_unknown_code_is_an_internal_error(code: int | None) -> None:
    assert by_exit_code(code) is AutotuneError


def test_every_code_is_described_once() -> None:
    codes = [kind.exit_code for kind in errors.KINDS]
    assert codes == sorted(set(codes))
    assert set(codes) == {c.exit_code for c in CLASSES}
    assert len({kind.stands_for for kind in errors.KINDS}) == len(codes)


def test_an_interruption_has_the_shells_exit_code() -> None:
    assert {InterruptedSearch(n).exit_code for n in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)} == {129, 130, 143}
    assert {129, 130, 143} == errors.INTERRUPTED
