"""Addresses of shared databases: what is secret in a URL is neither stored nor shown."""

from __future__ import annotations

import sys

import pytest

from autotune.base.errors import MachineError, UsageError
from autotune.base.layout import STORAGE_URL
from autotune.study.database import SharedDatabase
from autotune.study.storage_url import StorageUrl, typed_address, url_of_environment, with_credentials

SECRET = "s3cr{t"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        (f"postgresql://bob:{SECRET}@host:5433/tunings", "postgresql://bob@host:5433/tunings"),
        (f"postgresql+psycopg://bob:{SECRET}@host/tunings", "postgresql+psycopg://bob@host/tunings"),
        (
            f"postgresql://bob@host/tunings?password={SECRET}&sslmode=require",
            "postgresql://bob@host/tunings?sslmode=require",
        ),
        (f"mysql://bob:{SECRET}@host/tunings", "mysql://bob@host/tunings"),
    ],
)
def test_a_password_is_kept_apart(url: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="list of processes") as caught:
        typed_address(url, "--storage")
    assert SECRET not in f"{caught.value} {caught.value.advice}" and "PGPASSFILE" in str(caught.value.advice)
    monkeypatch.setenv(STORAGE_URL, url)
    found = url_of_environment()
    assert found == with_credentials(address) and found is not None
    assert found.address == typed_address(address, "--storage") == address
    assert found.secrets == {"password": SECRET} and SECRET not in repr(found)
    # For another database there are none.
    assert with_credentials(f"{address}_2").secrets == {}


@pytest.mark.parametrize(
    "text",
    ["", f"postgresql:bob:{SECRET}@host", "postgresql://bob@host", "sqlite:///study.db", "postgresql+asyncpg://host/x"],
)
def test_what_is_no_address_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        typed_address(text, "--storage")
    assert "--storage" in str(caught.value) and caught.value.advice and SECRET not in str(caught.value)


def test_a_driver_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MachineError, match="psycopg is not installed") as caught:
        SharedDatabase(StorageUrl("postgresql://bob@127.0.0.1:1/tunings", {"password": SECRET}), make=True)
    assert "autotune[postgresql]" in str(caught.value.advice)
