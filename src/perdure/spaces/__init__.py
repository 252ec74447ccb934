"""Floor 5: Spaces, sandboxes with a daemon in them, reached by a client and made by a provider."""
