"""Python environments that are packed here and unpacked on the workers' hosts."""
