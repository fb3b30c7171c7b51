"""The blocks of mlx-lm's language models, for `fully_shard` and `split_layers`."""

from functools import partial
from typing import Any

import mlx.core as mx

from pmesh.errors import UsageError
from pmesh.mlx.fully_sharded import Block

FAMILIES = ("llama", "mistral", "olmo2", "qwen2", "qwen3")
"""Model types whose forward pass is an embedding, layers with a causal mask, a norm and a head."""


def language_model_blocks(model: Any) -> list[Block]:  # noqa: ANN401 - mlx-lm has no types
    """Return the blocks of a model that `mlx_lm.load` returned, from token ids to logits.

    The last block is the norm and the head. The head may be the embedding of the first block.

    Args:
        model: a model of the type llama, mistral, olmo2, qwen2 or qwen3; it may be quantized and
            may have adapters. Token ids have the shape (batch, length), logits
            (batch, length, vocabulary).

    Raises:
        UsageError: the model has another type, or some of its layers see only a sliding window.
    """
    kind = str(getattr(model, "model_type", type(model).__name__))
    if kind not in FAMILIES:
        raise UsageError(
            f"the blocks of a {kind} are not known, but those of {', '.join(FAMILIES)}: pass "
            "a list of pmesh.mlx.Block in its place"
        )
    inner = model.model
    if any(getattr(layer, "use_sliding", False) for layer in inner.layers):
        raise UsageError(f"this {kind} has layers with a sliding window, which need another mask")
    tied = not hasattr(model, "lm_head")
    head = inner.embed_tokens if tied else model.lm_head
    return [
        Block((inner.embed_tokens,), inner.embed_tokens),
        *(Block((layer,), partial(_attend, layer)) for layer in inner.layers),
        Block((inner.norm, head), partial(_end, inner.norm, head.as_linear if tied else head)),
    ]


def _attend(layer: Any, x: mx.array) -> mx.array:  # noqa: ANN401 - as above
    attended: mx.array = layer(x, "causal" if x.shape[1] > 1 else None, None)
    return attended


def _end(norm: Any, head: Any, x: mx.array) -> mx.array:  # noqa: ANN401 - as above
    logits: mx.array = head(norm(x))
    return logits
