"""Seeing what an engine reads."""


def record_readings(executor, monkeypatch):
    """A list to which each prompt that is read is added, once, when it begins."""
    read, advance = [], executor.prefill.advance

    def recording(reading):
        if (reading.layer, reading.done) == (0, 0):
            read.append(list(reading.tokens))
        return advance(reading)

    monkeypatch.setattr(executor.prefill, "advance", recording)
    return read
