"""The modules of the package import each other without circles, each folder those below it.

Only one folder imports DeepSpeed.
"""

import ast
import graphlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "python" / "stepwell"


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def statements(tree):
    """Every import of a module, also in functions, but for those that only types need."""
    ahead = [tree]
    while ahead:
        node = ahead.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ahead += [] if is_for_types else ast.iter_child_nodes(node)


def imported(path):
    """The names of all modules, or of things in modules, that a file imports."""
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def target(name):
    """The module of the package that an imported name is, or lies in.

    The extension imports none.
    """
    if name.startswith("stepwell._core"):
        return None
    return next((known for known in (name, name.rpartition(".")[0]) if known in MODULES), None)


def test_no_module_imports_itself_by_way_of_others():
    graph = {
        name: {found for each in imported(path) if (found := target(each)) is not None} - {name}
        for name, path in MODULES.items()
    }
    assert sum(map(len, graph.values())) > len(graph)
    graphlib.TopologicalSorter(graph).prepare()


LAYERS = ("", "access", "weights", "ranks", "store", "planning", "offload", "deepspeed", "cli")
"""The folders, from the lowest: "" has the modules beside them."""


def layer(name):
    path = MODULES[name].relative_to(PACKAGE)
    return LAYERS.index("" if len(path.parts) == 1 else path.parts[0])


def test_a_folder_uses_only_what_is_below_it():
    entries = {"stepwell", "stepwell.__main__"}
    upwards = [
        (name, found)
        for name, path in MODULES.items()
        for each in imported(path)
        if (found := target(each)) is not None and layer(found) > layer(name)
    ]
    assert [pair for pair in upwards if pair[0] not in entries] == []


def test_only_the_folder_deepspeed_imports_deepspeed():
    outside = {
        name
        for name, path in MODULES.items()
        if any(each.split(".")[0] == "deepspeed" for each in imported(path))
        and not name.startswith("stepwell.deepspeed.")
    }
    # The benchmarks and the demo compare with DeepSpeed alone.
    assert all(name.startswith("stepwell.cli.") for name in outside)
