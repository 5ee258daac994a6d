"""Running the project's scripts as users do: another process, real pipes, one JSON line at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from dflash import contract

ROOT = Path(__file__).parent.parent


def run(name: str, *arguments: object, **options: Any) -> tuple[int, dict[str, Any], str]:
    """Run `scripts/NAME.py`; returns (exit status, envelope, stderr) and checks the envelope's shape."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        **options,
    )
    return done.returncode, envelope(done.stdout, done.stderr), done.stderr


def envelope(stdout: str, stderr: str = "") -> dict[str, Any]:
    """The one JSON object of a finished script, validated against its published schema."""
    lines = stdout.splitlines()
    assert len(lines) == 1, f"stdout is not one line: {stdout!r}\n{stderr}"
    value = json.loads(lines[0])
    Draft202012Validator(contract.schema(value["schema"])).validate(value)
    return value
