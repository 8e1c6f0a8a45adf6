"""The manifests of the documentation are what Kubernetes takes, and their commands what autotune takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

PAGE = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
MANIFESTS: list[dict[str, Any]] = [
    yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
]
#: The oldest version that is still in wide use, and a newer one.
VERSIONS = ("1.28", "1.31")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_a_manifest_is_valid(manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the extra cluster is not installed")
    kubernetes_validate.validate(manifest, version, strict=True)


def test_there_is_a_job_and_a_cron_job() -> None:
    assert [manifest["kind"] for manifest in MANIFESTS] == ["Job", "CronJob"]
    for manifest in MANIFESTS:
        pod = (manifest["spec"].get("jobTemplate", manifest)["spec"]["template"])["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {"/dev/shm", "/data", "/studies"} == {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
