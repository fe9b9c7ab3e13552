"""Sampling with transformers."""
