"""What the operands of an operation have to be, checked where a kernel would read beyond an array instead."""

import jax.numpy as jnp
from jax import Array

FLOATS, INT32 = "a floating dtype", "int32"
"""Kinds of operands."""


def check_operands(kind: str, *, sizes: dict[str, tuple[int, str]], **operands: tuple[Array, str]) -> None:
    """Checks operands of one kind, each given with the names of its axes, as in "batch kv_heads".

    Args:
        kind: FLOATS or INT32: what the dtypes must be.
        sizes: of the axes that were seen, with the operand that had them; those of these operands are added.

    Raises:
        ValueError: a dtype is of another kind, an operand has other axes or an empty one, or two operands differ in the
            size of an axis.
    """
    for name, (operand, axes) in operands.items():
        fits = operand.dtype == jnp.int32 if kind == INT32 else jnp.issubdtype(operand.dtype, jnp.floating)
        if not fits:
            raise ValueError(f"{name} is {operand.dtype}: it must be {kind}.")
        shape = f"{name}{list(operand.shape)}"
        if operand.ndim != len(axes.split()):
            raise ValueError(f"{shape} must have the axes [{', '.join(axes.split())}].")
        for axis, size in zip(axes.split(), operand.shape, strict=True):
            if not size:
                raise ValueError(f"{shape} is empty: {axis} must be at least 1.")
            known, owner = sizes.setdefault(axis, (size, name))
            if size != known:
                raise ValueError(f"{shape} has {axis}={size}, and {owner} has {axis}={known}: they must be equal.")
