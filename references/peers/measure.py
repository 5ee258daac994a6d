"""One engine's decode speed over mlx-lm's own, measured in that engine's environment, prompt by prompt.

    python measure.py ENGINE --target FOLDER --draft FOLDER --prompts FILE [--count 8] [--tokens 64] [--width 4]

ENGINE: dflash (this project), z-lab, mlx-dspark. Prints one JSON line per prompt and a summary. Stands alone: this
project's package and z-lab's have the same import name, so that each runs in an environment of its own. Weights run
in fp32; FILE is a JSON list of {prompt_tokens, greedy_tokens}; the ratio is of tokens per second after the first,
mlx-lm measured before and after the engine. Set LD_PRELOAD to OpenBLAS for engines that do not load it themselves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

Answer = tuple[list[int], float, float]  # tokens, seconds after the first, accepted length (0: not reported)
Engine = Callable[[list[int], int], Answer]


def ours(target: str, draft: str, width: int | None) -> tuple[object, Engine]:
    """This project, as a user would run it."""
    from dflash import DFlashConfig, DFlashRuntime
    from dflash.events import Cycle, Prefilled

    runtime = DFlashRuntime.from_pretrained(target, draft, DFlashConfig(draft_block_size=width))

    def answer(ids: list[int], count: int) -> Answer:
        text = runtime.target.tokenizer.decode(ids)
        tokens, cycles, first = [], 0, 0.0
        for event in runtime.events(text, use_chat_template=False, max_tokens=count, ignore_eos=True):
            if isinstance(event, Prefilled):
                tokens, first = [event.token], time.perf_counter()
            elif isinstance(event, Cycle):
                tokens.extend(event.tokens)
                cycles += 1
                last = time.perf_counter()
        return tokens, last - first, (len(tokens) - 1) / cycles

    return runtime.target.model, answer


def z_lab(target: str, draft: str, width: int | None) -> tuple[object, Engine]:
    import dflash.model_mlx as engine
    import mlx.core as mx
    from mlx_lm import load

    model, tokenizer = load(target)
    model.set_dtype(mx.float32)
    engine.snapshot_download = lambda folder, **_: folder  # its loader takes names on the hub only
    drafter = engine.load_draft(draft)
    drafter.set_dtype(mx.float32)

    def answer(ids: list[int], count: int) -> Answer:
        tokens, cycles, first = [], 0, 0.0
        for part in engine.stream_generate(
            model, drafter, tokenizer, mx.array(ids), block_size=width, max_tokens=count, temperature=0.0
        ):
            if not part.tokens:
                continue
            first = first or time.perf_counter()
            tokens.extend(part.tokens)
            cycles += 1
            last = time.perf_counter()
        return tokens, last - first, (len(tokens) - 1) / max(cycles - 1, 1)

    return model, answer


def dspark(target: str, draft: str, width: int | None) -> tuple[object, Engine]:
    import mlx.core as mx
    from mlx_dspark import dflash_generate, load_dflash, load_target

    wrapped, tokenizer = load_target(target, require_tap=True)
    wrapped.model.set_dtype(mx.float32)
    drafter, _ = load_dflash(draft, quantize=False)
    drafter.set_dtype(mx.float32)
    drafter.bind(wrapped.model)

    def answer(ids: list[int], count: int) -> Answer:
        done = dflash_generate(
            wrapped,
            tokenizer,
            drafter,
            prompt_ids=ids,
            max_new_tokens=count,
            max_draft_tokens=width and width - 1,
        )
        return list(done.token_ids), done.seconds - done.prefill_seconds, done.mean_accept_len

    return wrapped.model, answer


ENGINES = {"dflash": ours, "z-lab": z_lab, "mlx-dspark": dspark}


def stock_speed(model: object, ids: list[int], count: int) -> float:
    """mlx-lm's greedy tokens per second after the first."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    first = last = 0.0
    made = 0
    for _token, _ in generate_step(mx.array(ids), model, max_tokens=count):
        last = time.perf_counter()
        first = first or last
        made += 1
    return (made - 1) / (last - first)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=ENGINES)
    for flag in ("--target", "--draft", "--prompts"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--width", type=int)
    asked = parser.parse_args()
    model, answer = ENGINES[asked.engine](asked.target, asked.draft, asked.width)
    ratios, lengths, equal = [], [], 0
    cases = json.loads(Path(asked.prompts).read_text())[: asked.count]
    for case in cases:
        ids, expected = case["prompt_tokens"], case["greedy_tokens"]
        count = min(asked.tokens, len(expected))
        before = stock_speed(model, ids, count)
        tokens, seconds, length = answer(ids, count)
        stock = (before + stock_speed(model, ids, count)) / 2
        ratios.append((len(tokens) - 1) / seconds / stock)
        lengths.append(length)
        same = tokens[:count] == expected[: len(tokens[:count])]
        equal += same
        row = {"ratio": round(ratios[-1], 3), "accepted_length": round(length, 2), "equal": same}
        print(json.dumps({"engine": asked.engine, **row}), flush=True)
    summary = {"mean_ratio": round(statistics.mean(ratios), 3), "least_ratio": round(min(ratios), 3)}
    lengths = {"accepted_length": round(statistics.mean(lengths), 2)}
    line = {"engine": asked.engine, "width": asked.width, "prompts": len(cases), **summary, **lengths}
    print(json.dumps({**line, "equal": equal}))


if __name__ == "__main__":
    main()
