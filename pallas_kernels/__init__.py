"""One folder per operation: its plain jnp definition and its kernels. Imported as `sparda_jax.pallas_kernels`."""
