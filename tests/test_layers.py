"""Which package imports which: arrows point one way, and this reads the import statements."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dflash"
LEAVES = {"blas", "config", "contract", "errors", "events", "version"}

# What each part may import besides the leaves and itself. Parts not yet listed may import nothing.
ALLOWED = {
    "bench": {
        "curves",
        "decoding",
        "documents",
        "drafts",
        "kernels",
        "models",
        "plan",
        "result",
        "runtime",
        "targets",
    },
    "cli": {"commands"},
    "commands": {"bench", "cli", "curves", "models", "plan", "result", "runtime"},
    "data": {"drafts"},
    "documents": {"models"},
    "decoding": {"drafts", "targets"},
    "drafts": {"kernels"},
    "kernels": set(),
    "models": {"drafts", "plan", "targets"},
    "plan": {"models"},
    "result": set(),
    "curves": {"decoding", "drafts", "targets"},
    "runtime": {"curves", "decoding", "drafts", "models", "result", "text"},
    "targets": {"kernels"},
    "text": set(),
}
NO_MLX = LEAVES | {"cli", "text", "result"}


def part(path):
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(path):
    """Modules imported by a file: ("dflash.x.y" or "other", whether at module level)."""
    package = ["dflash", *path.relative_to(PACKAGE).parts[:-1]]
    tree = ast.parse(path.read_text())
    top = set(ast.walk(ast.Module([n for n in tree.body if not isinstance(n, ast.FunctionDef)], [])))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            names = [alias.name for alias in node.names] if module in ("dflash", "") else [""]
            yield from ((f"{module}.{name}".strip("."), node in top) for name in names)


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent != PACKAGE)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(path):
    mine = part(path)
    for module, _ in imports(path):
        names = module.split(".")
        if names[0] == "dflash" and len(names) > 1:
            assert names[1] in LEAVES | {mine} | ALLOWED.get(mine, set()), f"{path} imports {module}"
        assert names[0] != "scripts"


@pytest.mark.parametrize(
    "path", [p for p in FILES if part(p) in NO_MLX], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_parts_that_must_start_fast_do_not_import_mlx(path):
    for module, at_import in imports(path):
        if at_import:
            assert module.split(".")[0] not in {"mlx", "mlx_lm", "transformers"}, f"{path} imports {module}"


def test_the_public_names_are_these():
    import dflash

    assert dflash.__all__ == [
        "DFlashConfig",
        "DFlashError",
        "DFlashRuntime",
        "GenerationResult",
        "SamplingParams",
        "__version__",
    ]
    for name in dflash.__all__:
        assert getattr(dflash, name) is not None


def test_files_and_functions_stay_short():
    """400 lines and 60 lines are where a reader loses the thread; a little more is the limit."""
    for path in FILES:
        text = path.read_text()
        assert text.count("\n") <= 440, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = node.end_lineno - node.body[0].lineno + 1
                assert length <= 70, f"{path}: {node.name} has {length} lines"
