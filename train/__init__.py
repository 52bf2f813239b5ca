"""Training of the Forecast projections. Imported as `sparda_jax.train`."""
