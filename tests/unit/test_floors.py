"""The floors of the design, checked from the source: a module imports only from lower floors."""

import ast
from pathlib import Path

import pytest

import autotune

#: The lowest floor first. A package (``trial/``) stands on one floor; inside it modules may import each other.
FLOORS = (
    {"errors", "records", "clock", "photographs"},
    {"files"},
    {
        "layout",
        "space",
        "stats",
        "device",
        "host",
        "load",
        "pagecache",
        "catalog",
        "data",
        "workload",
        "observer",
        "protocol",
    },
    {"events", "client", "training", "launcher", "scoring", "wording", "gate"},
    {"trial", "search", "profile", "replay"},
    {"study", "queue", "store"},
    {"apply"},
    {"verify"},
    {"handover", "report"},
    {"tuning"},
    {"web"},
    {"daemon"},
    {"cli", "testing"},
    {"__main__"},
)
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
PACKAGE = Path(autotune.__file__).parent
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "_catalog" not in p.parts and p != PACKAGE / "__init__.py")


def unit_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_units(path: Path) -> set[str]:
    """The units of ours that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("autotune.")}
    return found - {"__version__", "Context", "Workload", "load_profile", "tune"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_from_lower_floors(path):
    unit = unit_of(path)
    assert unit in FLOOR, f"{unit} stands on no floor: add it to the table here and in the design"
    for other in imported_units(path) - {unit}:
        assert FLOOR[other] < FLOOR[unit], f"{unit} (floor {FLOOR[unit]}) imports {other} (floor {FLOOR[other]})"


def test_nothing_imports_the_child():
    importers = [p for p in MODULES if "trial" in imported_units(p) and unit_of(p) != "trial"]
    assert importers == []


def test_every_unit_of_the_table_exists():
    units = {unit_of(p) for p in MODULES}
    assert set(FLOOR) - units == set()


def test_catalog_files_stand_alone():
    for folder in ("models", "objectives"):
        for path in (PACKAGE.parent / folder).glob("*.py"):
            names = {p.stem for p in path.parent.glob("*.py")}
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    assert node.level == 0 and (node.module or "").split(".")[0] not in names, path
                if isinstance(node, ast.Import):
                    assert not {a.name.split(".")[0] for a in node.names} & names, path


def test_catalogs_are_no_packages():
    for folder in ("models", "objectives", "tests"):
        assert not (PACKAGE.parent / folder / "__init__.py").exists()
