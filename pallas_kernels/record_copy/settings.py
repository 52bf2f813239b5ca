"""What of the record copy depends on the machine, and not on the records."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopySettings:
    """The static choices of a copy.

    Attributes:
        ctas: thread blocks of the kernel, each of which takes an SM from whatever runs beside the copy; None: as many
            as the kernel takes by itself. The reference has none.

    Raises:
        ValueError: ``ctas`` is below 1.
    """

    ctas: int | None = None

    def __post_init__(self) -> None:
        if self.ctas is not None and self.ctas < 1:
            raise ValueError(f"ctas={self.ctas} is not allowed: use 1 or more, or None for the kernel's own number.")
