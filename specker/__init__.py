"""specker: the exact verify step of speculative decoding, usable by itself inside any decoder."""

from __future__ import annotations

from specker import random
from specker.adjustments import LogitBias
from specker.operators import BackendUnavailableError, available_backends, backend
from specker.rounds import VerifyResult
from specker.sample import DraftReceipt, SampleResult, sample
from specker.sampling import Sampling
from specker.status import InvalidInputError, Status
from specker.verify import verify, verify_flat, verify_from_probs
from specker.warmup import warmup

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "DraftReceipt",
    "InvalidInputError",
    "LogitBias",
    "SampleResult",
    "Sampling",
    "Status",
    "VerifyResult",
    "__version__",
    "available_backends",
    "backend",
    "random",
    "sample",
    "verify",
    "verify_flat",
    "verify_from_probs",
    "warmup",
]
