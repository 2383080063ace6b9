"""What a prepared generation config and its model inputs may hold; everything else is refused by name."""

from __future__ import annotations

from typing import Any

import torch

# Values with which a setting changes nothing; settings of plain decoding stand in no table, they are carried out.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0.0),
    "constraints": (None,),
    "force_words_ids": (None,),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "low_memory": (None, False),
    "guidance_scale": (None, 1.0),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "assistant_ensemble_weight": (None,),
    "prefill_chunk_size": (None,),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    # The loop keeps caches of its own; these names leave the choice open.
    "cache_implementation": (None, "dynamic", "dynamic_full", "hybrid"),
}
_INSTEAD = {
    "prompt_lookup_num_tokens": "; use speculative(PromptLookup())",
    "assistant_early_exit": "; use speculative(EarlyExit(num_layers))",
}
_CACHES = ("cache", "past_key_values")
_UNDERSTOOD = ("attention_mask", "position_ids", "logits_to_keep", "use_cache", *_CACHES)


def check_config(generation_config: Any) -> None:
    """Raise ValueError naming the first setting that speculative decoding cannot keep.

    Example:
        >>> check_config(transformers.GenerationConfig(num_beams=4))  # doctest: +SKIP
        Traceback (most recent call last):
        ValueError: num_beams: expected None or 1 with speculative(), got 4
    """
    for name, neutral in _NEUTRAL.items():
        value = getattr(generation_config, name, None)
        if value not in neutral:
            expected = " or ".join(str(choice) for choice in neutral)
            raise ValueError(f"{name}: expected {expected} with speculative(), got {value}{_INSTEAD.get(name, '')}")


def check_cache(model_kwargs: dict[str, Any]) -> None:
    """Raise ValueError where a cache was given that holds tokens, or that is of a fixed size.

    Example:
        >>> check_cache({"past_key_values": None})
    """
    for name in _CACHES:
        cache = model_kwargs.get(name)
        if cache is None:
            continue
        if type(cache).__name__ != "DynamicCache":
            raise ValueError(f"{name}: expected none with speculative(), got a {type(cache).__name__}")
        if cache.get_seq_length() > 0:
            raise ValueError(
                f"{name}: expected an empty one with speculative(), got one of {cache.get_seq_length()} tokens"
            )


def check_model_inputs(model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the attention mask, or raise ValueError for inputs that the decode loop does not carry.

    Example:
        >>> check_model_inputs(model, input_ids, {"attention_mask": None}) is None  # doctest: +SKIP
        True
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"model: expected a decoder with speculative(), got the encoder-decoder {type(model).__name__}"
        )
    if input_ids.shape[1] == 0 or "inputs_embeds" in model_kwargs:
        raise ValueError("inputs_embeds: expected token ids with speculative(), got embeddings")
    for name, value in model_kwargs.items():
        if name not in _UNDERSTOOD and value is not None:
            raise ValueError(f"{name}: expected no such model input with speculative(), got {type(value).__name__}")
    attention_mask: torch.Tensor | None = model_kwargs.get("attention_mask")
    position_ids = model_kwargs.get("position_ids")
    if position_ids is not None and not _counts_tokens(position_ids, input_ids, attention_mask):
        raise ValueError(
            f"position_ids: expected the number of tokens before each with speculative(), got {position_ids.tolist()}"
        )
    return attention_mask


def _counts_tokens(position_ids: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> bool:
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.dtype)
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, len(input_ids)):
        return False
    if position_ids.shape[1] != input_ids.shape[1]:
        return False
    # What stands at padding is read by nobody.
    surplus = (position_ids - (mask.cumsum(dim=1) - 1)) * mask
    return not bool(surplus.any())
