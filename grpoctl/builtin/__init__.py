"""What grpoctl brings along: the tiny policy `builtin:tiny` and its prompts, two-digit sums."""
