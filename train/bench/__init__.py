"""The benchmark of Forecast training."""
