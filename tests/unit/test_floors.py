"""The architecture, checked from the source: CONTRIBUTING's table of packages, where imports lead, unique names."""

import ast
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import autotune

PACKAGE = Path(autotune.__file__).parent
CONTRIBUTING = PACKAGE.parent / "CONTRIBUTING.md"
ROW = re.compile(r"^\| `(\w+)/` \| (\d+) \|", re.MULTILINE)
#: The packages by floor, from CONTRIBUTING.
FLOOR = {package: int(floor) for package, floor in ROW.findall(CONTRIBUTING.read_text())}
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "_catalog" not in p.parts and p.parent != PACKAGE)


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


BY_NAME = {dotted(path): path for path in MODULES}


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def imported(path: Path) -> set[str]:
    """Return the modules of autotune that a file imports, at any place in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in BY_NAME else node.module or "")
    return {name for name in found if name in BY_NAME}


def test_the_table_lists_every_package():
    assert set(FLOOR) == {package_of(p) for p in MODULES}


@pytest.mark.slow
def test_modules_import_only_from_their_own_package_and_lower_floors():
    upward = [
        f"{path.relative_to(PACKAGE)} (floor {FLOOR[package_of(path)]}) imports {name} (floor {FLOOR[other]})"
        for path in MODULES
        for name in sorted(imported(path))
        if (other := name.split(".")[1]) != package_of(path) and FLOOR[other] >= FLOOR[package_of(path)]
    ]
    assert upward == []


def test_there_are_no_import_circles():
    # A package's own module re-exports names of its modules, which need not import it.
    graph = {name: imported(path) - {name} for name, path in BY_NAME.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"these import each other: {error.args[1]}")


def test_no_two_public_classes_share_a_name():
    homes = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
