"""The one error of this package."""

from collections.abc import Sequence


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, converted or written; the message says what is wrong and the way out."""

    @classmethod
    def listing(cls, where: str, problems: Sequence[str], way_out: str) -> "CheckpointError":
        """One error for all problems, so that a second run is not needed to find the next of them."""
        lines = "".join(f"\n  {problem}" for problem in problems)
        return cls(f"{where}: {len(problems)} problem{'s' if len(problems) > 1 else ''}:{lines}\n{way_out}")
