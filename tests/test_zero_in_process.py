"""What the short runs of ZeRO (`zero_in_process*.py`) take from other tests and programs is there.

pytest does not collect them: `mutants.py` runs them.
"""

import ast
import importlib
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.glob("zero_in_process*.py"))


def taken(tree):
    """Every (module, name) that a file takes, also by an import of the module."""
    modules = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            modules |= {each.asname or each.name: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, each.name) for each in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in modules:
            yield modules[node.value.id], node.attr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_all_that_is_taken_is_there(path):
    own = {
        (module, name)
        for module, name in taken(ast.parse(path.read_text()))
        if (path.parent / f"{module}.py").exists()
    }
    assert len(own) > 10
    missing = [each for each in own if not hasattr(importlib.import_module(each[0]), each[1])]
    assert not missing
