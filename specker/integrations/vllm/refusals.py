"""Acceptance rules of vLLM that give up the target's distribution."""

from __future__ import annotations


def refuse_other_rules(**options: object) -> None:
    """Raise if an option that asks for another acceptance rule is set; None and False leave it out.

    Raises:
        NotImplementedError: naming the option.

    Example:
        >>> refuse_other_rules(fly_window_size=None, synthetic_mode=False)
    """
    for name, value in options.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"{name}: expected it unset, got one: specker keeps the target's distribution exactly and has no "
                "other acceptance rule"
            )
