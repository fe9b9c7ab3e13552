"""The built-in rewards, one a file."""
