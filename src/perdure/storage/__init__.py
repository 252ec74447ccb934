"""Floor 1: where commits go. Backends of the kernel's storage protocol, the owner lock and the fence."""
