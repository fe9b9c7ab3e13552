"""Folders that exist only once their manifest does: bytes on any store, tables, manifests, lineage."""
