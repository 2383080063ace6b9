"""vLLM's rejection sampler, under the signatures of its two runners; vLLM is imported by `patch` alone."""

from __future__ import annotations

from specker.integrations.vllm.batch import rejection_sample
from specker.integrations.vllm.patching import Patch, VersionError, patch
from specker.integrations.vllm.slots import rejection_sample_by_slot

__all__ = ["Patch", "VersionError", "patch", "rejection_sample", "rejection_sample_by_slot"]
