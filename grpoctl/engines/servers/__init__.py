"""Sampling on servers that run already, vLLM's or SGLang's: each proven to hold the policy first."""
