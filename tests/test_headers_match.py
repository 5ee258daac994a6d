"""The scripts' own headers (PEP 723) against pyproject.toml: one list of dependencies, and its copies."""

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
SHEBANG = "#!/usr/bin/env -S uv run --script"
# The format's own rule for finding the block.
BLOCK = re.compile(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$")


def header(path):
    """The metadata in a script, read as the specification says."""
    blocks = list(BLOCK.finditer(path.read_text(encoding="utf-8")))
    assert len(blocks) == 1, f"{path.name} has {len(blocks)} script blocks"
    lines = blocks[0].group("content").splitlines()
    return tomllib.loads("\n".join(line[2:] if line.startswith("# ") else line[1:] for line in lines))


def test_there_are_scripts():
    assert {path.stem for path in SCRIPTS} >= {"benchmark", "generate", "resolve_draft"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_scripts_header_equals_the_projects_dependencies(path):
    found = header(path)
    assert found == {
        "requires-python": PROJECT["requires-python"],
        "dependencies": PROJECT["dependencies"],
    }


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_runs_by_itself_and_only_hands_over(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith(SHEBANG + "\n") and path.stat().st_mode & 0o111
    assert "sys.path.insert(0, str(Path(__file__).resolve().parent.parent))" in text
    assert not any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in ast.walk(ast.parse(text)))
