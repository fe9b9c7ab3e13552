"""The soft punishment of completions that come close to the length limit."""

from __future__ import annotations


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Return 0 up to `max_tokens − buffer_tokens`, then a line down to −1 at `max_tokens`, and −1 beyond.

    Args:
        num_tokens: length of the completion, tokens
        max_tokens: the limit L_max, tokens
        buffer_tokens: width L_cache of the punished interval, tokens

    Raises:
        ValueError: the buffer is not within 1 … max_tokens.
    Source: DAPO (arXiv 2503.14476), equation 13.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens must be within 1 … max_tokens ({max_tokens}), got {buffer_tokens}")
    room = (max_tokens - buffer_tokens) - num_tokens
    return min(0.0, max(-1.0, room / buffer_tokens))
