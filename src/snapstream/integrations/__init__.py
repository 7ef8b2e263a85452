"""SnapStream inside other engines: thin layers over the core's configuration and compression."""
