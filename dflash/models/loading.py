"""From a folder to loaded weights: target, tokenizer, draft. And the proof that the tapped forward is the model's.

Dtypes: on a GPU weights run as they are stored. On a CPU they run as fp32, quantised ones included where memory
allows, because there only fp32 products go through BLAS (measured on two cores: a 16-token verify in bf16 takes
9 times as long, and 4- and 8-bit are slower still). Drafts never run in fp16: they overflow in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import dequantize_model, load_config, load_model, load_tokenizer

from ..drafts.base import Draft
from ..drafts.checkpoint import DraftConfig, is_draft
from ..drafts.dflash import DFlashDraft
from ..drafts.dflash2 import DFlash2Draft
from ..errors import BadCheckpoint, DFlashError, ModelIsDraft, UnsupportedModel
from ..targets.base import TargetAdapter
from ..targets.choose import choose
from ..targets.opaque import OpaqueTarget
from . import draft_bits, headers
from .tensor_names import model_classes

_PROBE = 8  # tokens; enough for every layer to attend to something


@dataclass(frozen=True)
class LoadedTarget:
    """A target ready to run.

    Attributes:
        model: mlx-lm's own model; `adapter` runs the same weights, there is no second copy.
        tokenizer: mlx-lm's wrapper around the Hugging Face tokenizer.
        end_tokens: ids that end an answer, by tokenizer and generation config.
        generation_defaults: the model's generation config, of use to requests that ask for its settings.
    """

    model: nn.Module
    adapter: TargetAdapter
    tokenizer: Any
    end_tokens: frozenset[int]
    generation_defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def why_plain(self) -> str | None:
        """Why no draft can help this target; None if one can."""
        return self.adapter.why if isinstance(self.adapter, OpaqueTarget) else None


def load_target(folder: Path, *, widen: bool) -> LoadedTarget:
    """Load the model and tokenizer in `folder`; `widen` turns its weights into fp32 (see `fitting`).

    Raises:
        ModelIsDraft: the folder holds a draft.
        UnsupportedModel: mlx-lm has no such model type.
        BadCheckpoint: weights or tokenizer are missing, damaged or do not fit the config.
    """
    if is_draft(headers.load_config(folder)):
        raise ModelIsDraft(f"{folder} is a draft, not a model that can answer by itself")
    config = load_config(folder)
    model = _load_model(folder)
    if widen:
        run_in_fp32(model)
    mx.eval(model.parameters())
    try:
        tokenizer = load_tokenizer(
            folder,
            {"trust_remote_code": False},  # unsaid, transformers asks on standard input
            eos_token_ids=_as_list(config.get("eos_token_id")),
        )
    except Exception as error:  # tokenizers of many makes: any failure means the same to the user
        raise BadCheckpoint(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    adapter = choose(model, config)
    if not isinstance(adapter, OpaqueTarget) and not runs_like(model, adapter):
        facts = {"vocab_size": adapter.vocab_size, "max_context": adapter.max_context}
        why = f"running the layers of {config['model_type']} one by one does not give the model's own logits"
        adapter = OpaqueTarget(model, **facts, why=why)
    defaults = headers.generation_defaults(folder)
    return LoadedTarget(model, adapter, tokenizer, frozenset(tokenizer.eos_token_ids), defaults)


def load_draft(
    folder: Path, target: TargetAdapter, *, widen: bool, bits: int | None = None, save_to: Path | None = None
) -> Draft:
    """Load the draft in `folder` and check that it belongs to `target`.

    Args:
        widen: as for the target; layers packed on request stay packed.
        bits: pack the linear layers to so many bits.
        save_to: a folder to make and write the draft to, before it is widened.

    Raises:
        UnsupportedDraft: not a DFlash draft, or a packaging with other conventions.
        DraftMismatch: it was made for a target of another geometry.
        BadCheckpoint: config and tensors contradict each other.
        UnsupportedModel: the target has no adapter, so that no draft can help it.
        BadValue: `bits` differs from what the draft is stored in, or `save_to` exists.
    """
    if isinstance(target, OpaqueTarget):
        raise UnsupportedModel(f"this target cannot run with a draft: {target.why}")
    config = DraftConfig.from_json(headers.load_config(folder))
    config.check_target(
        hidden_size=target.hidden_size, num_layers=target.num_layers, vocab_size=target.vocab_size
    )
    weights = _draft_weights(folder)
    draft = (DFlash2Draft if config.generation == 2 else DFlashDraft)(config)
    draft.load(weights)
    if bits is not None:
        draft_bits.quantise(draft, bits)
    if save_to is not None:
        draft_bits.save(draft, folder, save_to)
    dtype = target.embed(mx.array([[0]])).dtype
    if widen and bits is None:
        run_in_fp32(draft)
    else:
        cast(draft, mx.bfloat16 if dtype == mx.float16 else dtype)
    mx.eval(draft.parameters())
    return draft


def _draft_weights(folder: Path) -> dict[str, mx.array]:
    """The draft's tensors, of one file or of the shards that its index names."""
    weights: dict[str, mx.array] = {}
    for file in headers.weight_files(folder):
        try:
            weights |= mx.load(str(file))
        except RuntimeError as error:
            raise BadCheckpoint(f"{file} cannot be read: {error}") from error
    return weights


def runs_like(model: nn.Module, adapter: TargetAdapter) -> bool:
    """Whether the adapter's layer-by-layer forward gives the model's own logits on a few tokens.

    The same operations in the same order give the same bits; a scale, cap or mask that the adapter does not
    know of gives something else altogether. The bound leaves room for a compiler that fuses differently.
    """
    tokens = mx.arange(_PROBE)[None] % adapter.vocab_size
    try:
        expected = model(tokens).astype(mx.float32)
        ours = adapter.logits(adapter.start().forward(tokens).hidden).astype(mx.float32)
    except (TypeError, AttributeError, ValueError):  # layers with another signature
        return False
    if ours.shape != expected.shape:
        return False
    return mx.max(mx.abs(ours - expected)).item() <= 1e-2 * mx.max(mx.abs(expected)).item()


def run_in_fp32(module: nn.Module) -> None:
    """Turn every floating weight into fp32 in place; quantised layers become plain ones.

    Scales are widened first: dequantised values are then exact, not rounded to the scales' own dtype.
    """
    cast(module, mx.float32)
    dequantize_model(module)
    cast(module, mx.float32)


def cast(module: nn.Module, dtype: mx.Dtype) -> None:
    """Cast floating parameters in place; packed integer weights stay."""
    module.apply(lambda array: array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array)


def _load_model(folder: Path) -> nn.Module:
    """mlx-lm's model with its weights still lazy, its errors as ours."""
    try:
        return load_model(folder, lazy=True, get_model_classes=model_classes)[0]
    except DFlashError:
        raise
    except FileNotFoundError as error:
        raise BadCheckpoint(f"{folder} has no weights: {error}", "expected model*.safetensors") from error
    except ValueError as error:
        if "not supported" in str(error):
            raise UnsupportedModel(str(error), "use a model type that mlx-lm has") from error
        raise BadCheckpoint(f"the weights in {folder} do not fit its config.json: {error}") from error
    except KeyError as error:  # a family that looks for a prefix, for one
        first = ", ".join(sorted(headers.tensors(folder))[:3])
        why = f"{error} is neither in its config.json nor the beginning of its tensors' names ({first}, ...)"
        raise BadCheckpoint(f"the model in {folder} cannot be loaded: {why}") from error
    except (RuntimeError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"the model in {folder} cannot be loaded: {error}") from error


def _as_list(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
