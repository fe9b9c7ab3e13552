"""Value-head reward models: scoring and fitting."""
