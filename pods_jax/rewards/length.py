"""The penalty on over-long completions: from their number of tokens alone."""


def overlong_penalty(tokens: int, *, limit: int, margin: float) -> float:
    """Returns 0 up to ``limit - buffer`` tokens, and beyond them a penalty that falls in a straight line to -1 at ``limit``.

        ((limit - buffer) - tokens) / buffer,  buffer = margin * limit

    Args:
        tokens: Tokens of the completion, EOS included.
        limit: Longest completion in tokens; one that was cut there earns -1.
        margin: Share of the limit, at its end, over which the penalty grows; above 0.

    Reference: DAPO (arXiv 2503.14476), equation 13, with L_cache = margin * L_max.
    """
    buffer = margin * limit
    return max(-1.0, min(0.0, (limit - buffer - tokens) / buffer))
