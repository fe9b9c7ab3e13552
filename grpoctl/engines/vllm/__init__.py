"""Sampling with vLLM in this process."""
