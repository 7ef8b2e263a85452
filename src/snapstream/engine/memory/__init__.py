"""The engine's memory: planned before anything is loaded, by building it without contents."""
