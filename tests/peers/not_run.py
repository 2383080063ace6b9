"""Tests of the engines that do not run here: patterns of names with a reason each; the first that fits counts."""

from __future__ import annotations

OTHER_RULE = "asks for an acceptance rule that gives up the target's distribution; the adapter refuses it"
BLOCK = "asks for block verification, which specker has not; the adapter refuses it"
WATERMARK = "asks for watermarked tokens, which leave the target's distribution; the adapter refuses them"
NOT_REPLACED = "tests a function of the engine's own that no adapter replaces"
NAN = "wants a token from a row of NaN; the adapter emits none and says so in the status"
SLOW = "draws its drafts by a kernel of vLLM's: more than a minute in Triton's interpreter"
TOO_LARGE = "its rows are gigabytes: the same code on another shape"

VLLM_BATCH = {
    "test_fly_*": OTHER_RULE,
    "test_synthetic_*": OTHER_RULE,
    "test_sample_recovered_tokens*": NOT_REPLACED,
}
VLLM_SLOTS = {
    "test_fly_*": OTHER_RULE,
    "test_synthetic_*": OTHER_RULE,
    "test_chunked_requests_match_full_batch[[]2-*": OTHER_RULE,
    "test_watermarked_*": WATERMARK,
    "test_repeated_*": WATERMARK,
    "test_block_verification_*": BLOCK,
    "test_verify_rejects_unproposed_drafts": BLOCK,
    "test_placeholder_blocks_later_draft_tokens[[]True]": BLOCK,
    "test_adaptive_draft_lengths_match_and_bonus_oracle[[]*-True]": BLOCK,
    "test_multiround_rejection_sample_is_unbiased[[]*-True]": BLOCK,
    "test_multiround_rejection_sample_is_unbiased[[]True-*": SLOW,
    "test_gumbel_drafted_*": SLOW,
    "test_stochastic_rejection_sample[[]*-3-*": TOO_LARGE,
    "test_all_nan_target_logits_in_range*": NAN,
}
# Everything but the chain test.
FLASHINFER = {f"test_{name}*": NOT_REPLACED for name in ("sampling", "softmax", "top_", "min_p")}
