"""Floor 7: what proves the rest, for users too: conformance suites, simulation, the scripted model."""
