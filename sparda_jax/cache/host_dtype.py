"""What the records of the host pool are made of: the model's own numbers, or a byte for each."""

import enum

import jax
import jax.numpy as jnp

from sparda_jax.pallas_kernels.record_copy import Code, packed_rows


class KvHostDtype(enum.StrEnum):
    """``--kv-host-dtype``. Slots in device memory stay in the model's dtype: a fetch brings it back."""

    AUTO = "auto"
    """The dtype of the keys and values."""
    INT8 = "int8"
    """A byte for each number, and a scale for each row."""
    FP8 = "fp8"
    """The same in float8_e4m3fn: finer for what is small in its row, coarser for what is large."""

    @property
    def code(self) -> Code | None:
        """How numbers become bytes; None: they stay as they are."""
        return None if self is KvHostDtype.AUTO else Code(self.value)


def host_record(record: tuple[int, int], dtype: jnp.dtype, kv_host_dtype: KvHostDtype) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one record in the host pool.

    Args:
        record: rows and head_dim.
        dtype: of the keys and values.
        kv_host_dtype: what the pool keeps of them.
    """
    if code := kv_host_dtype.code:
        return jax.ShapeDtypeStruct((packed_rows(*record), record[1]), code.words)
    return jax.ShapeDtypeStruct(record, dtype)
