"""Publishing a policy: to a folder of versions, or to the hub."""
