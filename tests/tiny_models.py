"""Tiny random language models and tokenizers: the real classes of transformers, small enough for many runs."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def tiny_llama(seed: int, *, vocab: int = 32, layers: int = 2, eos: int | None = None, **options: Any) -> Any:
    """Return a random Llama in float32 whose next-token distributions are far from uniform."""
    sizes = {
        "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 512, "initializer_range": 0.6, "tie_word_embeddings": False, "bos_token_id": None,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=vocab, num_hidden_layers=layers, eos_token_id=eos, **{**sizes, **options}
    )
    return _build(transformers.LlamaForCausalLM, config, seed)


def tiny_mistral(seed: int, *, vocab: int = 32, sliding_window: int) -> Any:
    """Return a random Mistral, whose layers see only the last few tokens."""
    config = transformers.MistralConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=sliding_window,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _build(transformers.MistralForCausalLM, config, seed)


def tiny_gpt2() -> Any:
    """Return a random GPT-2, whose decoder is built otherwise than Llama's."""
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=64,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _build(transformers.GPT2LMHeadModel, config, seed=8)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread: tiny models gain nothing from more, and lose much where others use the processor."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def opposite(model: Any) -> Any:
    """Return a model whose arg-max is the given model's arg-min."""
    negated = type(model)(model.config).eval()
    negated.load_state_dict(model.state_dict())
    with torch.no_grad():
        negated.lm_head.weight.neg_()
    return negated


def greedy(model: Any, input_ids: torch.Tensor, max_new_tokens: int, eos: int | None = None) -> list[int]:
    """Return the new tokens of transformers' own greedy decoding."""
    generated = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos,
        pad_token_id=0,
    )
    tokens: list[int] = generated[0, input_ids.shape[1] :].tolist()
    return tokens


def continuation_law(model: Any, prompt: list[int], length: int, eos: int) -> dict[str, float]:
    """Return the probability of every continuation of up to `length` tokens, ended early by `eos` alone."""
    vocab = model.config.vocab_size
    sequences = torch.tensor([[*prompt, *tokens] for tokens in itertools.product(range(vocab), repeat=length)])
    with torch.no_grad():
        logits = model(sequences).logits[:, len(prompt) - 1 : -1].double()
    probs = torch.softmax(logits, dim=-1).gather(-1, sequences[:, len(prompt) :, None])[..., 0].numpy()
    law: dict[str, float] = {}
    for tokens, steps in zip(sequences[:, len(prompt) :].tolist(), probs, strict=True):
        end = tokens.index(eos) + 1 if eos in tokens else length
        # Every completion behind the end carries the same prefix: its probability is entered once.
        law[",".join(map(str, tokens[:end]))] = float(np.prod(steps[:end]))
    return law


def save_folder(model: Any, folder: Path) -> Path:
    """Save a model with a byte-level tokenizer, as a local folder that the command line can load."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(["<eos>", *symbols])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return folder


BYTE_VOCAB = 257
"""Vocabulary of the models that `save_folder` gives its tokenizer."""


def noisy(model: Any, noise: float, seed: int = 0) -> Any:
    """Return a copy of a model with noise on its weights: a draft that is right often but not always."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return copied


def left_padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return the prompts as one batch with its mask; the padding holds a token that means something elsewhere."""
    length = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[7] * (length - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }


def tiny_family(name: str) -> Any:
    """Return a random model of another family: "mistral", "gemma2", "gemma3", "qwen2", "qwen3", "gpt2" or "opt".

    Windows are four tokens wide, so that a short text leaves them.
    """
    sizes = {
        "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    grouped = {
        **sizes, "intermediate_size": 32, "num_key_value_heads": 1, "initializer_range": 0.6, "pad_token_id": None,
        "max_position_embeddings": 128,
    }  # fmt: skip
    gemma = {**grouped, "sliding_window": 4, "head_dim": 8, "query_pre_attn_scalar": 8}
    if name == "mistral":
        return tiny_mistral(seed=4, sliding_window=4)
    if name == "gpt2":
        return tiny_gpt2()
    if name == "gemma2":
        return _build(transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**gemma), seed=5)
    if name == "gemma3":
        config = transformers.Gemma3TextConfig(**gemma, layer_types=["sliding_attention", "full_attention"] * 2)
        return _build(transformers.Gemma3ForCausalLM, config, seed=5)
    if name == "qwen2":
        config = transformers.Qwen2Config(**grouped, sliding_window=4, use_sliding_window=True, max_window_layers=2)
        return _build(transformers.Qwen2ForCausalLM, config, seed=5)
    if name == "qwen3":
        return _build(transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**grouped, head_dim=8), seed=5)
    config = transformers.OPTConfig(
        **sizes, ffn_dim=32, init_std=0.6, pad_token_id=0, word_embed_proj_dim=16, max_position_embeddings=128
    )
    return _build(transformers.OPTForCausalLM, config, seed=5)


def _build(kind: Any, config: Any, seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind(config).eval()
