"""Plain torch: the reference that every other training engine is held to, and FSDP2 on several processes."""
