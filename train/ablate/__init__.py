"""Ablations of the Forecast: what one choice is worth, all else equal (docs/ablations.md)."""
