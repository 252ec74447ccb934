"""Floor 4: the tools that come with the package, and the local environment they work in."""
