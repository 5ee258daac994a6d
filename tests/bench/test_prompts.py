"""The shipped prompts, and files of a user's own."""

import json
from collections import Counter

import pytest
import script

from dflash.bench import prompts
from dflash.errors import BadValue, NotFound


def test_a_few_prompts_of_each_kind_are_shipped_each_with_its_own_name():
    found = prompts.shipped()
    assert Counter(prompt.kind for prompt in found).keys() == set(prompts.KINDS)
    assert all(3 <= count <= 4 for count in Counter(prompt.kind for prompt in found).values())
    assert len({prompt.id for prompt in found}) == len(found)
    assert all(prompt.id.startswith(prompt.kind) and prompt.text == prompt.text.strip() for prompt in found)


def test_none_of_them_is_one_that_drafts_here_were_judged_by():
    judged = {
        case["prompt"]
        for case in json.loads((script.ROOT / "tests/fixtures/smollm2-prompts.json").read_text())
    }
    assert judged and not judged & {prompt.text for prompt in prompts.shipped()}


def test_kinds_are_chosen_in_the_order_asked_for_and_cut_to_a_number():
    found = prompts.chosen(prompts.shipped(), "math, chat", 2)
    assert [prompt.kind for prompt in found] == ["math", "math", "chat", "chat"]
    assert len(prompts.chosen(prompts.shipped(), None, None)) == len(prompts.shipped())
    with pytest.raises(BadValue, match="poetry"):
        prompts.chosen(prompts.shipped(), "poetry", 1)


def test_a_file_has_texts_and_objects(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(["Hello", {"prompt": "1+1?", "kind": "math"}, {"prompt": "x", "id": "named"}]))
    found = prompts.from_file(file)
    assert [(prompt.id, prompt.kind) for prompt in found] == [
        ("mine-1", "own"),
        ("mine-2", "math"),
        ("named", "own"),
    ]


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"prompt": "x"}', "[3]", '[" "]', '[{"kind": "chat"}]', '[{"prompt": "x", "id": 3}]'],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path, content):
    (tmp_path / "mine.json").write_text(content)
    with pytest.raises(BadValue, match=r"mine\.json"):
        prompts.from_file(tmp_path / "mine.json")


def test_one_name_twice_is_refused_and_a_missing_file_is_not_found(tmp_path):
    (tmp_path / "mine.json").write_text('[{"prompt": "x", "id": "a"}, {"prompt": "y", "id": "a"}]')
    with pytest.raises(BadValue, match="same id"):
        prompts.from_file(tmp_path / "mine.json")
    with pytest.raises(NotFound):
        prompts.from_file(tmp_path / "other.json")
