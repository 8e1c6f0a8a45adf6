"""The architecture, checked from the source: CONTRIBUTING's table of rooms, the direction of imports, unique names."""

import ast
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import autotune

PACKAGE = Path(autotune.__file__).parent
CONTRIBUTING = PACKAGE.parent / "CONTRIBUTING.md"
ROW = re.compile(r"^\| `(\w+)/?` \| (\d+) \|", re.MULTILINE)
#: The rooms by floor, from CONTRIBUTING.
FLOOR = {room: int(floor) for room, floor in ROW.findall(CONTRIBUTING.read_text())}
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "_catalog" not in p.parts and p != PACKAGE / "__init__.py")


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


BY_NAME = {dotted(path): path for path in MODULES}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


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


def rooms_imported(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported(path)} - {room_of(path)}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_from_lower_floors(path):
    room = room_of(path)
    assert room in FLOOR, f"{room} stands on no floor: add it to the table in CONTRIBUTING.md"
    for other in rooms_imported(path):
        assert FLOOR[other] < FLOOR[room], f"{room} (floor {FLOOR[room]}) imports {other} (floor {FLOOR[other]})"


def test_the_table_lists_every_room():
    assert set(FLOOR) == {room_of(p) for p in MODULES}


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


def test_nothing_imports_the_child():
    assert [p for p in MODULES if "child" in rooms_imported(p)] == []


def test_catalog_files_stand_alone():
    for folder in ("models", "objectives"):
        for path in (PACKAGE.parent / folder).glob("*.py"):
            names = {p.stem for p in path.parent.glob("*.py")}
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    assert node.level == 0 and (node.module or "").split(".")[0] not in names, path
                if isinstance(node, ast.Import):
                    assert not {a.name.split(".")[0] for a in node.names} & names, path


def test_catalogs_are_not_packages():
    for folder in ("models", "objectives", "tests"):
        assert not (PACKAGE.parent / folder / "__init__.py").exists()
