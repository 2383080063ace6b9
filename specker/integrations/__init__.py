"""Verify functions under the signatures of other engines; each module imports its peer lazily or not at all."""
