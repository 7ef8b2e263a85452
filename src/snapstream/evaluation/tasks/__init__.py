"""Seeded task generators used by the evaluation lab, the demo and the tests."""
