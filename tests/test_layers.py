"""The structure of the package, beyond what import-linter checks."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import dflash

PACKAGE = Path(dflash.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def _imported(module: str) -> set[str]:
    code = f"import sys, {module}; print('\\n'.join(sys.modules))"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_the_command_line_starts_without_heavy_packages() -> None:
    assert not _imported("dflash.cli") & {"torch", "transformers", "datasets", "pyarrow", "numpy"}


def test_planning_needs_no_torch() -> None:
    assert not _imported("dflash.train.sampler, dflash.cache.manifest, dflash.world") & {
        "torch",
        "transformers",
    }


def test_every_module_says_what_it_is() -> None:
    silent = [str(path) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_package_files_hold_a_docstring_and_nothing_else() -> None:
    for path in SOURCES:
        if path.name == "__init__.py" and path.parent != PACKAGE:
            assert len(ast.parse(path.read_text()).body) == 1, path


def test_files_and_functions_stay_short() -> None:
    lengths = []
    for path in SOURCES:
        text = path.read_text()
        assert text.count("\n") <= 400, f"{path.name} has {text.count(chr(10))} lines"
        lengths += [
            (node.end_lineno - node.lineno + 1, f"{path.name}:{node.name}")
            for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
    lengths.sort()
    assert lengths[-1][0] <= 80, lengths[-1]
    assert lengths[int(0.95 * len(lengths))][0] <= 45
    assert lengths[len(lengths) // 2][0] <= 12


def test_the_map_in_the_package_docstring_names_modules_that_exist() -> None:
    import re

    for name in re.findall(r"`(\w+)`", dflash.__doc__ or ""):
        assert (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists(), name
