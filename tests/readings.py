"""Seeing what an engine reads."""


def record_readings(engine, monkeypatch):
    """A list to which each prompt that is read is added, once, when it begins."""
    read, advance = [], engine.model_runner.prefiller.advance

    def recording(job):
        if (job.layer, job.done) == (0, 0):
            read.append(list(job.tokens))
        return advance(job)

    monkeypatch.setattr(engine.model_runner.prefiller, "advance", recording)
    return read
