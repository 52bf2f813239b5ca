"""How large a prompt's filler may be, for any tokenizer."""

from collections.abc import Callable


class TooShortError(ValueError):
    """Not even the smallest prompt fits the length."""


def largest_fitting(tokens_of: Callable[[int], int], room: int, *, least: int) -> int:
    """The largest size whose prompt has at most ``room`` tokens, as binary search finds it.

    Args:
        tokens_of: tokens of the prompt of a size; more for a larger one, but for small waves.
        room: tokens.
        least: the smallest size there is.

    Raises:
        TooShortError: the prompt of the smallest size has more tokens.
    """
    tokens = tokens_of(least)
    if tokens > room:
        raise TooShortError(f"the smallest prompt takes {tokens} tokens, and {room} are there")
    low, high = least, 2 * least
    while tokens_of(high) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tokens_of(middle) <= room else (low, middle)
    return low


def shrunk_to_fit(tokens_of: Callable[[int], int], room: int, size: int, *, least: int) -> int:
    """``size``, or the next smaller one whose prompt fits, in steps of a fiftieth.

    Raises:
        TooShortError: none fits.
    """
    while tokens_of(size) > room:
        if size == least:
            raise TooShortError(f"the smallest prompt takes {tokens_of(least)} tokens, and {room} are there")
        size = max(least, size - max(1, size // 50))
    return size
