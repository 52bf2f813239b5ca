"""The definition of the record copy in plain jnp: one record after the other, as many as the counts say."""

import jax
from jaxtyping import Array, Int, Shaped

from sparda_jax.pallas_kernels.record_copy.codes import code_of
from sparda_jax.pallas_kernels.record_copy.packing import pack_records, unpack_records


def copy_in_turn(
    counts: Int[Array, "segments"],
    from_ids: Int[Array, "segments width"],
    to_ids: Int[Array, "segments width"],
    source: Shaped[Array, "from_records from_rows head_dim"],
    destination: Shaped[Array, "to_records to_rows head_dim"],
) -> Shaped[Array, "to_records to_rows head_dim"]:
    """``destination[to_ids[s, i]] = source[from_ids[s, i]]`` for every segment s and i < counts[s].

    Records that are packed on one side only are unpacked or packed, in device memory.

    Source and destination may lie in different memories; the result lies where the destination does. The loops keep it
    in place when it is donated. On a GPU each record is a kernel of its own: right, but slow.
    """
    memory = jax.typeof(destination).memory_space

    def changed(record: Array) -> Array:
        if source.dtype == destination.dtype:
            return record
        record = jax.device_put(record, jax.memory.Space.Device)
        if code := code_of(destination.dtype):
            return pack_records(record, code)
        return unpack_records(record, destination.shape[1], destination.dtype)

    def copy_segment(segment: Array, destination: Array) -> Array:
        def copy_one(i: Array, destination: Array) -> Array:
            record = jax.lax.dynamic_index_in_dim(source, from_ids[segment, i], keepdims=True)
            record = jax.device_put(changed(record), memory)
            return jax.lax.dynamic_update_index_in_dim(destination, record, to_ids[segment, i], axis=0)

        return jax.lax.fori_loop(0, counts[segment], copy_one, destination)

    return jax.lax.fori_loop(0, counts.shape[0], copy_segment, destination)
