"""GRPO training as stage-separated batch jobs over files."""

__version__ = "0.1.0"
