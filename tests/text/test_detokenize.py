"""Pieces joined equal the decoded whole, for the tokenizers' own habits and for incomplete characters."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dflash.text.detokenize import REPLACEMENT, TextStream


def byte_level():
    """GPT-2's kind: every byte is a token, and a few longer ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "Ġthe", "Ġ", "ĠĠ", "\u00e4\u00bd\u0142", "ing"]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(dict.fromkeys(tokens))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # encodes byte by byte
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece():
    """Llama's kind: a word-border mark, bytes as a fallback, and no space at the very beginning."""
    tokens = [f"<0x{b:02X}>" for b in range(256)] + ["▁", "▁the", "▁a", "s", "é", "日", "▁▁", "\n"]
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()


def pieces_of(tokenizer, ids):
    stream = TextStream(lambda some: tokenizer.decode(list(some), skip_special_tokens=False))
    pieces = [stream.push(token) for token in ids]
    return [*pieces, stream.finish()]


@settings(max_examples=400)
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40))
def test_any_byte_level_ids_join_to_the_whole(ids):
    assert "".join(pieces_of(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids, skip_special_tokens=False)


@settings(max_examples=400)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20))
def test_any_text_in_byte_level_bytes_comes_back_without_replacement_marks(text):
    pieces = pieces_of(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids)
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@settings(max_examples=400)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["▁", "▁the", "▁a", "s", "é", "日", "▁▁", "\n"]).map(lambda t: [t]),
            st.characters(exclude_categories=["Cs"]).map(lambda c: [f"<0x{b:02X}>" for b in c.encode()]),
        ),
        max_size=15,
    )
)
def test_sentencepiece_words_and_characters_in_bytes_join_to_the_whole(groups):
    ids = [SENTENCEPIECE.token_to_id(token) for group in groups for token in group]
    assert "".join(pieces_of(SENTENCEPIECE, ids)) == SENTENCEPIECE.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "text", [" leading", "  two", "\x00nul", "e\u0301 combining", "👩‍👩‍👧 family", "日本語", "\n\n a"]
)
def test_what_streaming_classes_are_known_to_lose_arrives(text):
    assert "".join(pieces_of(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids)) == text


def test_a_character_is_given_out_with_its_last_byte():
    assert pieces_of(BYTE_LEVEL, BYTE_LEVEL.encode("é日x").ids) == ["", "é", "", "", "日", "x", ""]
