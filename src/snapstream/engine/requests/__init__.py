"""A request's life: it is admitted, waits, has a slot, and leaves as text."""
