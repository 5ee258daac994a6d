"""A GGUF file's vocabulary as Hugging Face tokenizer files.

Two kinds are common in llama models: byte-level BPE ("gpt2"), cut into words by a rule that the file only
names, and SentencePiece BPE ("llama"), which has no list of merges but a score for each piece. A name that is
not known here is refused: another rule would give other tokens and a quietly worse model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import BadCheckpoint, DFlashError, UnsupportedModel

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # of token_type; 5 is unused, 6 a byte
_SPECIAL = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, of a turn, of a message
_SPACE = "▁"  # SentencePiece's visible space


@dataclass(frozen=True)
class _Words:
    """How byte-level BPE cuts text before merging: each pattern in turn splits what the earlier ones left."""

    patterns: tuple[str, ...]
    whole_words_first: bool = False  # a word that is a token needs no merges to it
    starts_with_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DIGITS_APART = _Words((r"\p{N}", _GPT2))
_LLAMA3_WORDS = _Words((_LLAMA3,), whole_words_first=True, starts_with_bos=True)
_PRE = {
    "gpt-2": _Words((_GPT2,)),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "llama3": _LLAMA3_WORDS,
    "llama-v3": _LLAMA3_WORDS,
    "llama-bpe": _LLAMA3_WORDS,
    "qwen2": _Words((_QWEN2,)),
    "deepseek-r1-qwen": _Words((_QWEN2,)),
    "default": _Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) to `folder`.

    Raises:
        UnsupportedModel: a kind of tokenizer or a word-splitting rule that is not known here.
        BadCheckpoint: its parts contradict each other.
    """
    kind = metadata.get(f"{_KEY}model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"the GGUF file has a tokenizer of kind {kind}; this build reads gpt2 and llama"
        )
    if not metadata.get(f"{_KEY}tokens"):
        raise BadCheckpoint("the GGUF file has no vocabulary (tokenizer.ggml.tokens)")
    try:
        tokenizer, with_bos = _byte_level(metadata) if kind == "gpt2" else _sentence_piece(metadata)
        _add_special(tokenizer, metadata)
        _add_ends(tokenizer, metadata, metadata.get(f"{_KEY}add_bos_token", with_bos))
    except DFlashError:
        raise
    except Exception as error:  # what tokenizers raises for contradictory parts is a bare Exception
        raise BadCheckpoint(f"the GGUF file's vocabulary cannot be read: {error!r}") from error
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _tokenizer_config(metadata)
    text = json.dumps(config, ensure_ascii=False, indent=1)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def end_tokens(metadata: dict[str, Any]) -> list[int]:
    """Ids that end an answer, without repeats."""
    ids = [metadata.get(f"{_KEY}{name}") for name in _ENDS]
    return list(dict.fromkeys(token for token in ids if token is not None))


def special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    """Ids of the special tokens that the file names, by role: bos, eos, unk, pad."""
    tokens = metadata[f"{_KEY}tokens"]
    ids = {role: metadata.get(f"{_KEY}{key}") for role, key in _SPECIAL.items()}
    for role, token in ids.items():
        if token is not None and not 0 <= token < len(tokens):
            raise BadCheckpoint(
                f"the GGUF file's {role} token is {token}, its vocabulary has {len(tokens)} entries"
            )
    return {role: token for role, token in ids.items() if token is not None}


def _byte_level(metadata: dict[str, Any]) -> tuple[Tokenizer, bool]:
    name = metadata.get(f"{_KEY}pre")
    if name not in _PRE:
        raise UnsupportedModel(
            f"the GGUF file splits words by the rule {name}; this build knows {', '.join(sorted(_PRE))}",
            "give the model in safetensors format, which carries its whole tokenizer",
        )
    words = _PRE[name]
    merges = [tuple(pair.split(" ", 1)) for pair in metadata[f"{_KEY}merges"]]
    tokenizer = Tokenizer(models.BPE(_vocabulary(metadata), merges, ignore_merges=words.whole_words_first))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, words.starts_with_bos


def _sentence_piece(metadata: dict[str, Any]) -> tuple[Tokenizer, bool]:
    tokens, types = metadata[f"{_KEY}tokens"], _types(metadata)
    vocabulary = _vocabulary(metadata)
    unknown = special_ids(metadata).get("unk", 0)
    merges = _merges_by_score(
        {
            piece: score
            for piece, score, kind in zip(tokens, metadata[f"{_KEY}scores"], types, strict=True)
            if kind == _NORMAL
        }
    )
    model = models.BPE(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaces = [normalizers.Replace(" ", _SPACE)]
    pieces = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(f"{_KEY}add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        pieces.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(pieces)
    return tokenizer, True


def _merges_by_score(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the best result first.

    SentencePiece joins whichever neighbours make the piece with the highest score, so the rank of a merge is
    its result's. Ways to the same piece are ordered by the scores of their halves.
    """
    merges = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                merges.append((-score, -scores[left], -scores[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _vocabulary(metadata: dict[str, Any]) -> dict[str, int]:
    return {token: number for number, token in enumerate(metadata[f"{_KEY}tokens"])}


def _types(metadata: dict[str, Any]) -> list[int]:
    tokens = metadata[f"{_KEY}tokens"]
    return metadata.get(f"{_KEY}token_type", [_NORMAL] * len(tokens))


def _add_special(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    """Tokens that are found in a text whole, before it is cut: markers, and what the model's maker added."""
    for text, kind in zip(metadata[f"{_KEY}tokens"], _types(metadata), strict=True):
        if kind in (_UNKNOWN, _CONTROL):
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(text, special=False, normalized=False)])


def _add_ends(tokenizer: Tokenizer, metadata: dict[str, Any], with_bos: bool) -> None:
    """What encoding puts around a text. A chat template writes its own, and is encoded without these."""
    tokens, ids = metadata[f"{_KEY}tokens"], special_ids(metadata)
    around = {
        "bos": with_bos and "bos" in ids,
        "eos": metadata.get(f"{_KEY}add_eos_token", False) and "eos" in ids,
    }
    used = [(tokens[ids[role]], ids[role]) for role, wanted in around.items() if wanted]
    if not used:
        return
    before = [tokens[ids["bos"]]] if around["bos"] else []
    after = [tokens[ids["eos"]]] if around["eos"] else []
    second = [f"{token}:1" for token in before], [f"{token}:1" for token in after]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *second[0], "$B:1", *second[1]],
        special_tokens=used,
    )


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata[f"{_KEY}tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    config |= {f"{role}_token": tokens[token] for role, token in special_ids(metadata).items()}
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
