"""How much host memory JAX pins for arrays of one size.

Pinned arrays come from regions that JAX takes from the CUDA driver one by one and never gives back. The first two
regions have the size of the next power of two above an array, each later one is twice the one before, and the last one
is what the pool's limit leaves. An array lies in one region whole, so what is left at a region's end is pinned for
nothing. (XLA's BFCAllocator with allow_growth, from which XLA makes its pool of host memory.)
"""

GIB = 1 << 30
PINNED_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Read by JAX when it starts; in GiB, whatever its name says."""
DEFAULT_PINNED_LIMIT = 64 * GIB
STAGING = 2 * GIB
"""Of the limit, for JAX's own transfers: an array on its way to the device is copied to pinned memory first."""


def pinned_bytes(array_bytes: int, count: int, limit: int) -> int | None:
    """Bytes that get pinned for ``count`` arrays under a limit in bytes; None if they don't fit."""
    total, left = 0, count
    region = following = 1 << (array_bytes - 1).bit_length()
    while left > 0:
        taken = min(region, limit - STAGING - total)
        if taken < array_bytes:
            return None
        total += taken
        left -= taken // array_bytes
        region, following = following, 2 * following
    return total + STAGING


def pinned_limit_for(array_bytes: int, count: int) -> int:
    """The smallest limit, in whole GiB, that holds ``count`` arrays."""
    # Regions are at least half full, and the last one is at most as large as all others together.
    too_small, enough = 0, (4 * count * array_bytes + STAGING) // GIB + 1
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        if pinned_bytes(array_bytes, count, middle * GIB) is None:
            too_small = middle
        else:
            enough = middle
    return enough
