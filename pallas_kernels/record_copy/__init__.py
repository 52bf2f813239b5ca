"""Record copy: missing KV records from the pinned host pool into HBM slots, and finished ones back."""

from sparda_jax.pallas_kernels.record_copy.api import (
    copy_backend,
    fetch_records,
    fetch_records_queued,
    write_back_records,
)
from sparda_jax.pallas_kernels.record_copy.codes import Code
from sparda_jax.pallas_kernels.record_copy.memory_space import device_as_host, host_as_device
from sparda_jax.pallas_kernels.record_copy.packing import pack_records, packed_rows, unpack_records
from sparda_jax.pallas_kernels.record_copy.plan import pack_plan, plan_width, unpack_plan
from sparda_jax.pallas_kernels.record_copy.settings import CopySettings

__all__ = [
    "Code",
    "CopySettings",
    "copy_backend",
    "device_as_host",
    "fetch_records",
    "fetch_records_queued",
    "host_as_device",
    "pack_plan",
    "pack_records",
    "packed_rows",
    "plan_width",
    "unpack_plan",
    "unpack_records",
    "write_back_records",
]
