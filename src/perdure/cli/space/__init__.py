"""``perdure space``: the Spaces of a directory and of a store."""
