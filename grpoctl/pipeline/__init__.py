"""The cycle of stages over files: its run, its numbers, the servers it keeps."""
