"""Stop strings over streamed text."""

from collections.abc import Sequence


class StopChecker:
    """Finds the first stop string in text that arrives in pieces, whatever the pieces.

    Only text that may yet turn out to be the beginning of a stop string is held back. The string that is complete
    first ends the text; of two that are complete at the same character, the longer one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """
        Args:
            stops: non-empty strings.
        """
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Takes the next piece; returns the text that is safe to show and whether a stop string was found."""
        self._held += text
        ends = [(start + len(stop), start) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if ends:
            shown, self._held = self._held[: min(ends)[1]], ""
            return shown, True
        kept = self._possible_prefix()
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return shown, False

    def flush(self) -> str:
        """The held-back text, at the end of a text in which no stop string was completed."""
        shown, self._held = self._held, ""
        return shown

    def _possible_prefix(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
