"""From what a user wrote for a reward to a checked record, without importing user code here."""
