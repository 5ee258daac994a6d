"""What copying earlier text adds to the draft: decode speed on a prompt that asks for a file with one name changed.

    python -m dflash.bench.lookup_gain

Takes the embedded pair (or --model, --draft). Runs plain decoding, copies alone, the draft alone and both, in one
process, round after round in turned order; all must answer with the same tokens. Prints one JSON line with the median
tokens per second after the first token, and the ratio of both together over the draft alone.
"""

from __future__ import annotations

import json
import statistics

import fire

from ..config import DFlashConfig
from ..models.embedded import EMBEDDED
from ..runtime import DFlashRuntime

FILE = '''\
import json
from pathlib import Path


class Store:
    """Keeps notes in a JSON file."""

    def __init__(self, path):
        self.path = Path(path)
        self.notes = {}

    def load(self):
        if self.path.exists():
            self.notes = json.loads(self.path.read_text())
        return self.notes

    def save(self):
        self.path.write_text(json.dumps(self.notes, indent=2))

    def add(self, title, text):
        if title in self.notes:
            raise KeyError(title)
        self.notes[title] = text
        self.save()

    def remove(self, title):
        del self.notes[title]
        self.save()

    def search(self, word):
        return [title for title, text in self.notes.items() if word in text]


if __name__ == "__main__":
    store = Store("notes.json")
    store.load()
    store.add("first", "hello world")
    print(store.search("hello"))
'''
PROMPT = f"""A file:

```python
{FILE}```

The same file, rewritten with the class name Store changed to Notebook:

```python
"""
_CONFIGS = {
    "baseline": DFlashConfig(mode="baseline"),
    "lookup": DFlashConfig(mode="lookup"),
    "dflash": DFlashConfig(lookup=False),
    "dflash+lookup": DFlashConfig(),
}


def main(
    model: str = EMBEDDED,
    draft: str | None = None,
    max_tokens: int = 320,
    rounds: int = 3,
    text: bool = False,
) -> None:
    """Measure and print; see the module's docstring. `text` prints the answer before."""
    base = DFlashRuntime.from_pretrained(model, draft)
    engines = {name: DFlashRuntime(base.target, base.draft, config) for name, config in _CONFIGS.items()}
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    lengths, tokens = {}, None
    for turn in range(rounds):
        for name in sorted(engines, reverse=bool(turn % 2)):
            result = engines[name].generate(PROMPT, use_chat_template=False, max_tokens=max_tokens)
            if tokens not in (None, result.tokens):
                raise SystemExit(f"{name} answers with other tokens")
            tokens = result.tokens
            speeds[name].append(result.tokens_per_second)
            lengths[name] = round(result.accepted_length, 2)
    if text:
        print(result.text)
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    shown = {
        "tokens": len(tokens),
        "equal_tokens": True,
        "tokens_per_s": {name: round(median, 2) for name, median in medians.items()},
        "accepted_length": lengths,
        "both_over_draft": round(medians["dflash+lookup"] / medians["dflash"], 3),
    }
    print(json.dumps(shown))


if __name__ == "__main__":
    fire.Fire(main)
