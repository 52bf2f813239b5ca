"""The definition of the record copy in plain jnp: one record after the other, as many as the counts say."""

import jax
from jaxtyping import Array, Int, Shaped


def copy_in_turn(
    counts: Int[Array, "segments"],
    from_ids: Int[Array, "segments width"],
    to_ids: Int[Array, "segments width"],
    source: Shaped[Array, "from_records rows head_dim"],
    destination: Shaped[Array, "to_records rows head_dim"],
) -> Shaped[Array, "to_records rows head_dim"]:
    """``destination[to_ids[s, i]] = source[from_ids[s, i]]`` for every segment s and i < counts[s].

    Source and destination may lie in different memories; the result lies where the destination does. The loops keep it
    in place when it is donated. On a GPU each record is a kernel of its own: right, but slow.
    """
    memory = jax.typeof(destination).memory_space

    def copy_segment(segment: Array, destination: Array) -> Array:
        def copy_one(i: Array, destination: Array) -> Array:
            record = jax.lax.dynamic_index_in_dim(source, from_ids[segment, i], keepdims=True)
            record = jax.device_put(record, memory)
            return jax.lax.dynamic_update_index_in_dim(destination, record, to_ids[segment, i], axis=0)

        return jax.lax.fori_loop(0, counts[segment], copy_one, destination)

    return jax.lax.fori_loop(0, counts.shape[0], copy_segment, destination)
