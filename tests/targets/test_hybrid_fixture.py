"""The trained hybrid pair in `fixtures/hybrid`: 2,000 tokens equal to mlx-lm's own, whatever the drafter does.

Random weights answer with noise whose logits lie far apart; trained ones repeat, hesitate and tie nearly, keep long
memories in some heads and short ones in others. fp32, where equality with mlx-lm is exact.
"""

import itertools
import random
import shutil

import pytest
import script
import tiny

import dflash.commands.resolve_draft  # noqa: F401  (registers the schema of its result)
from dflash.decoding.loop import decode
from dflash.decoding.state import DecodeState
from dflash.decoding.width import FixedWidth
from dflash.events import Cycle
from dflash.models.loading import load_draft, load_target
from dflash.targets.gated_delta import GatedDeltaTarget, LinearMemory

PAIR = script.ROOT / "tests" / "fixtures" / "hybrid"
ANSWER = 500  # tokens; four prompts make the 2,000
BLOCK = 16

SHORT = [
    '"""Read and write delimited records."""\n\nimport os\nimport sys\n\n\nclass Reader:\n    def __init__(self, f',
    "def merge(left, right, *, key=None):\n    result = []\n    i = j = 0\n    while i < len(left) and",
    "    def test_close(self):\n        with self.assertRaises(ValueError) as cm:\n            self.",
]


def module(words):
    """Source like the library's own, long enough that an answer to it crosses position 1,024."""
    text = '"""Containers with checked access."""\n\nimport threading\n'
    for first, second in itertools.pairwise(words):
        text += (
            f"\n\nclass {first.title()}:\n    def __init__(self, {second}=None):\n"
            f"        self._{first} = {second} or []\n        self._lock = threading.Lock()\n\n"
            f"    def get_{second}(self, index):\n        with self._lock:\n"
            f"            if index >= len(self._{first}):\n                raise IndexError(index)\n"
            f"            return self._{first}[index]\n"
        )
    return text + "\n\nclass"


PROMPTS = [*SHORT, module(["queue", "item", "stream", "line", "table", "row", "cache", "entry"])]
LONG = len(PROMPTS) - 1


@pytest.fixture(scope="module")
def target():
    return load_target(PAIR / "target", widen=True)


@pytest.fixture(scope="module")
def draft(target):
    return load_draft(PAIR / "draft", target.adapter, widen=True)


@pytest.fixture(scope="module")
def cases(target):
    """(prompt, what mlx-lm's greedy decoding answers) as ids, for each prompt. 2,000 tokens in all."""
    prompts = [target.tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]
    answers = [tiny.greedy(target.model, prompt, ANSWER) for prompt in prompts]
    assert sum(map(len, answers)) == 2000
    return list(zip(prompts, answers, strict=True))


def run(target, draft, case, width, chunk=512):
    """Decode a case with a draft, compare every token, and return the cycles."""
    prompt, answer = case
    state = DecodeState(
        target=target.adapter,
        session=target.adapter.start(draft.taps),
        drafter=draft.start(target.adapter),
        prompt=list(prompt),
        budget=len(answer),
        end_tokens=frozenset(),
        draft_limit=draft.max_context,
    )
    cycles = [event for event in decode(state, FixedWidth(width), chunk) if isinstance(event, Cycle)]
    assert state.emitted == answer
    assert state.session.offset == len(prompt) + len(answer) - 1
    return cycles


def run_scripted(target, case, width, chunk, lengths):
    """As `run`, with a drafter that is right as often as `lengths` says; returns the lengths of whole cycles."""
    prompt, answer = case
    scripted = tiny.ScriptedDraft(answer, len(prompt), lengths)
    cycles = run(target, scripted, case, width, chunk)
    assert [c.accepted for c in cycles if c.drafted] == scripted.drafter.expected
    return {c.accepted for c in cycles if c.width == width}


def test_the_pair_is_a_small_hybrid_of_both_kinds_of_layer(target, draft):
    assert isinstance(target.adapter, GatedDeltaTarget)
    memories = target.adapter.start()._memories
    assert {isinstance(memory, LinearMemory) for memory in memories} == {True, False}
    assert draft.block_size == BLOCK and len(draft.taps) == 3
    assert sum(file.stat().st_size for file in PAIR.rglob("*") if file.is_file()) < 12_000_000


def test_one_answer_crosses_position_1024(cases):
    prompt, answer = cases[LONG]
    assert len(prompt) < 1024 - BLOCK < 1024 + 100 < len(prompt) + len(answer)


# Together these two see every one of the 2,000 tokens; each drafter sees all of them in the slow tier. The draft is
# no good one (its card says why): what it is for is a real context, real taps and a real mix of right and wrong.


@pytest.mark.parametrize(("case", "width", "chunk"), [(0, 4, 512), (1, 16, 512), (LONG, 8, 20)])
def test_every_accepted_length_of_an_adversarial_draft_leaves_the_answer_alone(
    target, cases, case, width, chunk
):
    occurred = run_scripted(target, cases[case], width, chunk, itertools.cycle(range(width)))
    assert occurred == set(range(width))


def test_with_its_own_draft_the_answers_equal_mlx_lm(target, draft, cases):
    cycles = run(target, draft, cases[2], 5, chunk=64)
    assert {0, 1, 2} <= {cycle.accepted for cycle in cycles}
    # A draft with wrong taps, mask token or positions answers as well, and accepts next to nothing.
    assert (ANSWER - 1) / len(cycles) > 1.15


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 3, 5, 8, 16, 32])
@pytest.mark.parametrize("chunk", [7, 512])
def test_2000_tokens_with_adversarial_drafts_equal_mlx_lm(target, cases, width, chunk):
    dice, occurred = random.Random(width), set()
    for case in cases:
        occurred |= run_scripted(target, case, width, chunk, iter(lambda: dice.randrange(width), None))
    occurred |= run_scripted(target, cases[0], width, chunk, itertools.cycle(range(width // 2)))
    occurred |= run_scripted(target, cases[0], width, chunk, itertools.cycle(range(width // 2, width)))
    assert occurred == set(range(width))


@pytest.mark.slow
@pytest.mark.parametrize(("width", "chunk"), [(2, 512), (4, 64), (7, 7), (16, 512)])
def test_2000_tokens_with_its_own_draft_equal_mlx_lm(target, draft, cases, width, chunk):
    for case in cases:
        run(target, draft, case, width, chunk)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A copy elsewhere, as a user has it: nothing but the folders' own files can be read."""
    base = tmp_path_factory.mktemp("a hybrid pair")
    return [shutil.copytree(PAIR / part, base / part) for part in ("target", "draft")]


def test_resolve_draft_accepts_the_pair_as_folders(folders):
    status, said, _ = script.run("resolve_draft", folders[0], "--draft", folders[1], "--offline")
    result = said["result"]
    assert status == 0 and result["compatible"] is True
    assert (result["kind"], result["generation"]) == ("hybrid", 1)


def test_generate_answers_with_the_pair_as_folders(folders, cases):
    status, said, _ = script.run(
        *("generate", PROMPTS[0], "--model", folders[0], "--draft", folders[1], "--offline"),
        *("--block-size", BLOCK, "--max-tokens", 80, "--no-eos", "--tokens"),
    )
    result = said["result"]
    assert status == 0 and result["mode"] == "dflash"
    assert result["tokens"] == cases[0][1][:80]
    assert result["speculation"]["accepted_length"] > 1
