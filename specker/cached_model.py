"""A causal language model with the key-value cache of the sequences it has read, on any supported transformers."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
from collections.abc import Collection
from typing import Any

import torch


class CachedModel:
    """A Hugging Face causal language model that reads on from where it stopped and can take back what it read.

    Args:
        model: a `PreTrainedModel` in evaluation mode whose cache can be cropped.
        role: the word for it in errors, such as "target".

    Raises:
        ValueError: the model is in training mode, or its kind of cache cannot be cropped.

    Example:
        >>> cached = CachedModel(target, "target")  # doctest: +SKIP
        >>> logits = cached.advance(input_ids, num_logits=1)  # doctest: +SKIP
    """

    def __init__(self, model: Any, role: str) -> None:
        if model.training:
            raise ValueError(f"{role}: expected a model in evaluation mode, got one in training mode; call .eval()")
        self.model = model
        self.num_cached = 0
        self._parameters = inspect.signature(model.forward).parameters
        self._cache = _croppable_cache(model, role)

    def advance(self, token_ids: torch.Tensor, num_logits: int) -> torch.Tensor:
        """Read the tokens that follow those in the cache.

        Args:
            token_ids: `(batch, length)` int64, length >= num_logits.
            num_logits: of how many of the last tokens the logits are wanted.

        Returns:
            `(batch, num_logits, vocab)` in the model's dtype.
        """
        # transformers 5.18 renamed the argument; the model's own signature says which name it has.
        cache_name = "cache" if "cache" in self._parameters else "past_key_values"
        arguments = {"input_ids": token_ids, cache_name: self._cache, "use_cache": True}
        if "logits_to_keep" in self._parameters:
            arguments["logits_to_keep"] = num_logits
        logits: torch.Tensor = self.model(**arguments).logits
        self.num_cached += token_ids.shape[1]
        return logits[:, -num_logits:]

    def keep(self, num_tokens: int) -> None:
        """Take back all tokens in the cache but the first `num_tokens`; no effect where it holds fewer."""
        surplus = self.num_cached - num_tokens
        # A negative count removes tokens in every release; 0 would empty the cache in 4.57.
        if surplus > 0:
            self._cache.crop(-surplus)
            self.num_cached = num_tokens


def _croppable_cache(model: Any, role: str) -> Any:
    dynamic_cache = importlib.import_module("transformers").DynamicCache
    cache = dynamic_cache(config=model.config)
    # Layers that forget (sliding windows, linear attention) must be told to remember until they are cropped.
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()
    elif any(cache.is_sliding):
        # Before transformers 5.17 they cannot be told; layers that keep everything give the same attention.
        cache = dynamic_cache()
    if not getattr(cache, "is_croppable", True):
        raise ValueError(
            f"{role}: expected a model whose key-value cache can be cropped, got {type(model).__name__} "
            "with layers that cannot take tokens back"
        )
    return cache


def vocab_size(model: Any) -> int:
    """Return the number of columns of a model's logits.

    Example:
        >>> vocab_size(target)  # doctest: +SKIP
        49152
    """
    return int(model.config.get_text_config().vocab_size)


def skip_layers(model: Any, layers: Collection[int]) -> Any:
    """Return the model without some of its decoder layers, sharing all its weights.

    Args:
        model: a `PreTrainedModel` whose decoder holds its layers in `layers`.
        layers: which to leave out, 0..num_layers-1 each.

    Raises:
        ValueError: the layers do not exist, or none would be left, or the decoder is built otherwise.

    Guarantees: no weight is copied, and the model given stays as it is.

    Example:
        >>> draft = skip_layers(target, [3, 17])  # doctest: +SKIP
    """
    num_layers = len(_decoder_layers(model))
    unknown = sorted(set(layers) - set(range(num_layers)))
    if unknown:
        raise ValueError(f"skipped layers: expected numbers in 0..{num_layers - 1}, got {unknown}")
    kept = [index for index in range(num_layers) if index not in set(layers)]
    if not kept:
        raise ValueError(f"skipped layers: expected at least one of {num_layers} layers to stay, got all of them")
    # A deep copy in which every tensor stands for itself: new modules, the same weights.
    shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    shallow = copy.deepcopy(model, shared)
    all_layers = _decoder_layers(shallow)
    shallow.get_decoder().layers = torch.nn.ModuleList(all_layers[index] for index in kept)
    for position, layer in enumerate(_decoder_layers(shallow)):
        # The number under which a layer finds its part of the cache.
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, "layer_idx", position)  # noqa: B010 - typed as a tensor or a module otherwise
    config = shallow.config.get_text_config()
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[index] for index in kept]
    return shallow


def _decoder_layers(model: Any) -> torch.nn.ModuleList:
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise ValueError(
            f"skipped layers: expected a model whose decoder has a ModuleList `layers`, got {type(model).__name__}"
        )
    return layers
