"""Record copy: missing KV records from the pinned host pool into HBM slots, and finished ones back."""

from sparda_jax.pallas_kernels.record_copy.api import (
    copy_backend,
    fetch_records,
    fetch_records_queued,
    write_back_records,
)
from sparda_jax.pallas_kernels.record_copy.memory_space import device_as_host, host_as_device
from sparda_jax.pallas_kernels.record_copy.plan import pack_plan, plan_width, unpack_plan
from sparda_jax.pallas_kernels.record_copy.settings import CopySettings

__all__ = [
    "CopySettings",
    "copy_backend",
    "device_as_host",
    "fetch_records",
    "fetch_records_queued",
    "host_as_device",
    "pack_plan",
    "plan_width",
    "unpack_plan",
    "write_back_records",
]
