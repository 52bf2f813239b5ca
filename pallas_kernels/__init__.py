"""One folder per operation: a plain jnp definition and its accelerator kernels. Imported as `sparda_jax.pallas_kernels`."""
