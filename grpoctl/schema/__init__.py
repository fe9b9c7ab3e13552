"""What the files look like: tables, manifests and their published schemas."""
