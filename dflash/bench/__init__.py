"""Measurements. Every figure in the documents is printed by a command of this package or of `scripts/`."""
