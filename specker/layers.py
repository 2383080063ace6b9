"""A model without some of its decoder layers, sharing all its weights: the draft of self-speculation."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection
from typing import Any

import torch


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
    total = num_layers(model)
    unknown = sorted(set(layers) - set(range(total)))
    if unknown:
        raise ValueError(f"skipped layers: expected numbers in 0..{total - 1}, got {unknown}")
    kept = [index for index in range(total) if index not in set(layers)]
    if not kept:
        raise ValueError(f"skipped layers: expected at least one of {total} layers to stay, got all of them")
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


def num_layers(model: Any) -> int:
    """Return the number of a model's decoder layers.

    Raises:
        ValueError: the decoder is built otherwise.

    Example:
        >>> num_layers(target)  # doctest: +SKIP
        30
    """
    return len(_decoder_layers(model))
