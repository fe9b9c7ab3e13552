"""Megatron-LM's layers, tensor and data parallel."""
