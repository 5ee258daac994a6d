"""references/families.md against what the tests build and the registry knows."""

import re
from pathlib import Path

import tiny

from dflash.models import registry

ROWS = [
    line.split("|")[1:-1]
    for line in (Path(__file__).parent.parent / "references" / "families.md").read_text().splitlines()
    if line.startswith("|") and not line.startswith("|---")
]
ADAPTERS = {"attention": tiny.FAMILIES | tiny.OTHERS, "sliding": tiny.SLIDING, "hybrid": tiny.HYBRIDS}


def test_every_family_that_is_tested_stands_in_the_table_with_its_adapter():
    stated = {(name, row[1].strip()) for row in ROWS for name in re.findall(r"`(\w+)`", row[0])}
    built = {
        (entry.get("model_type", name), adapter)
        for adapter, families in ADAPTERS.items()
        for name, entry in families.items()
    }
    assert built <= stated


def test_every_target_of_the_registry_stands_in_the_table():
    stated = {name.split(" (")[0].strip() for row in ROWS for name in row[-1].split(",")}
    assert {target.name.split("/")[1] for target in registry.entries()} <= stated
