"""The optimizer steps over one batch."""
