"""Training a value-head reward model, and scoring with one."""
