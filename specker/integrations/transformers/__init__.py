"""specker inside Hugging Face transformers: assisted generation's acceptance step, and a decode loop of its own."""

from __future__ import annotations

from specker.integrations.transformers.acceptance import AcceptanceCounts, accelerate

__all__ = ["AcceptanceCounts", "accelerate"]
