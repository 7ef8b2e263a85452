"""SnapStream inside other engines. Thin: configuration and compression come from the core, the rest from the host."""
