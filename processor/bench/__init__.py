"""Measuring the engine against what else could do its work, on one chip, in one run."""
