"""Documents rendered from `templates/`: what they say of the code is taken from the code.

python -m dflash.documents        writes SKILL.md anew; a test fails while it is stale
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from .config import DEFAULT_MAX_TOKENS
from .models.embedded import DEFAULT
from .version import __version__

_PACKAGE = Path(__file__).resolve().parent
ROOT = _PACKAGE.parent


def templates_folder() -> Path:
    """Beside the package in a checkout, inside it in an installed wheel."""
    inside = _PACKAGE / "templates"
    return inside if inside.is_dir() else ROOT / "templates"


def render(name: str, **values: Any) -> str:
    """The text of template `name`; values are escaped where it makes HTML. A missing value is an error."""
    loader = jinja2.FileSystemLoader(templates_folder())
    environment = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=name.endswith(".html.j2"),
    )
    return environment.get_template(name).render(**values)


def skill() -> str:
    """The text of SKILL.md."""
    return render(
        "SKILL.md.j2",
        version=__version__,
        pair=DEFAULT,
        max_tokens=DEFAULT_MAX_TOKENS,
    )


if __name__ == "__main__":
    (ROOT / "SKILL.md").write_text(skill(), encoding="utf-8")
