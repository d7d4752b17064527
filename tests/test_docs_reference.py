"""The pages that repeat what the sources say: options, and messages."""

import ast
import re
import runpy

import pytest
from test_docs import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / "ARCHITECTURE.md").is_file(), reason="the pages are not beside the tests"
)


def test_the_page_of_options_is_what_signatures_and_docstrings_say():
    written = runpy.run_path(str(ROOT / "docs" / "options.py"))
    expected = written["page"]()
    assert written["PAGE"].read_text() == expected, "hint: python docs/options.py"


def test_messages_of_the_page_are_said_somewhere():
    page = (ROOT / "docs" / "errors.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 20
    said = {
        node.value
        for path in ROOT.glob("python/stepwell/**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert [each for each in messages if not any(each in text for text in said)] == []
