"""Evaluation of compressed caches: tasks, metrics and experiments."""
