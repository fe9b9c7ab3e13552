"""Sampling and training backends, one per file: arrays in, arrays out; none sees an artifact's path."""
