"""specker inside Hugging Face transformers: assisted generation's acceptance step, and a decode loop of its own."""

from __future__ import annotations

from specker.integrations.transformers.acceptance import AcceptanceCounts, accelerate, speculative_sampling
from specker.integrations.transformers.decoding import SpeculativeGenerate, speculative

__all__ = ["AcceptanceCounts", "SpeculativeGenerate", "accelerate", "speculative", "speculative_sampling"]
