"""The five stages: each reads artifacts, calls an engine or formulas, and writes one artifact."""
