"""Decode: all slots in static graphs, inside caches of fixed size."""
