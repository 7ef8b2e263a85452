"""The store of sequences: what is kept, what is evicted, and what a disk, a crash or a thread can do to it."""

import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from snapstream.cache import (
    CompressedSequence,
    EntryShape,
    LayerGroup,
    SequenceDirectory,
    SequenceStore,
    StoreFullError,
)
from snapstream.compression import lay_out_window
from snapstream.errors import CacheFileError, ConfigurationError
from tests.raising import Raise

GROUPS = [LayerGroup((0, 1), EntryShape(2, 8, latent=False))]
EACH = 2 * 2 * 2 * 8 * 4
"""Bytes of a token: two layers of keys and values, of two heads of 8 float32 numbers."""


class Files:
    """Saves and loads sequences of a model that does not exist."""

    def __init__(self, model="a model"):
        self.model, self.fails = model, None

    def save(self, sequence, path, *, note=""):
        if self.fails:
            raise self.fails
        CompressedSequence(
            sequence.groups, sequence.layers, sequence.positions, sequence.layouts, sequence.tokens, note=note
        ).save(path, model=self.model)

    def load(self, path):
        return CompressedSequence.load(path, model=self.model, groups=GROUPS, entry_type=torch.float32)

    def check(self, path, described):
        if described["tokens"] > 1000:
            raise CacheFileError(f"{path} is too long for this engine")


def sequence(tokens, seed=0):
    """A sequence of random numbers."""
    made = torch.Generator().manual_seed(seed)
    layers = [GROUPS[0].entry.empty(1, tokens, entry_type=torch.float32) for _ in range(2)]
    for layer in layers:
        for tensor in layer.tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=made))
    return CompressedSequence(GROUPS, layers, (), (lay_out_window(tokens, tokens),), (seed,) * tokens)


def same(one, other):
    pairs = zip(one.layers, other.layers, strict=True)
    return one.tokens == other.tokens and all(
        torch.equal(x, y) for a, b in pairs for x, y in zip(a.tensors, b.tensors, strict=True)
    )


def directory(path, files=None, **options):
    return SequenceDirectory(path, files or Files(), kind="thing", **({"max_bytes": 2**30} | options))


def files_of(path):
    return sorted(each.name.removesuffix(".thing.safetensors") for each in path.glob("*.thing.safetensors"))


def test_the_least_recently_used_one_goes_first():
    store = SequenceStore(10 * EACH)
    for key in "abc":
        store.put(key, sequence(3), {})
    store.release(store.take("a"))
    store.put("d", sequence(4), {})
    assert {each.key for each in store.all()} == {"a", "c", "d"}
    assert store.take("b") is None
    store.put("c", sequence(1), {"new": 1})  # in place of what was there, so nobody has to go
    assert (store.get("c").about, store.nbytes, store.loaded) == ({"new": 1}, 8 * EACH, 3)
    assert store.delete("c")
    assert not store.delete("c")


def test_what_is_in_use_stays_and_takes_room():
    store = SequenceStore(10 * EACH)
    store.put("a", sequence(6), {})
    taken = store.take("a")
    store.put("b", sequence(4), {})
    with pytest.raises(StoreFullError) as error:
        store.put("c", sequence(5), {})
    assert not error.value.is_too_large
    assert {each.key for each in store.all()} == {"a", "b"}  # nobody has gone in vain
    with pytest.raises(StoreFullError) as error:
        store.put("c", sequence(11), {})
    assert error.value.is_too_large
    store.delete("a")
    assert taken.sequence is not None
    assert store.nbytes == 10 * EACH
    store.release(taken)
    assert store.nbytes == 4 * EACH
    store.put("c", sequence(6), {})


def test_time_ends_what_is_not_used(tmp_path):
    now = [0.0]
    store = SequenceStore(10 * EACH, directory(tmp_path, seconds=10), seconds=10, clock=lambda: now[0])
    for key in "ab":
        store.save(store.put(key, sequence(3), {}))
    taken = store.take("a")
    now[0] = 11
    assert store.get("b") is None
    assert store.get("a") is taken
    store.sweep()
    assert files_of(tmp_path) == ["a"]
    store.release(taken)
    now[0] = 22
    store.sweep()
    assert not len(store)
    assert not files_of(tmp_path)


def test_what_is_evicted_comes_back_from_the_disk_as_it_was(tmp_path):
    store = SequenceStore(10 * EACH, directory(tmp_path))
    made = {str(number): sequence(3, number) for number in range(8)}
    for key, each in made.items():
        store.put(key, each, {"number": key})
        store.flush()
    assert store.nbytes <= 10 * EACH
    assert len(store) == 8
    for key in [*made, *made]:
        taken = store.take(key)
        assert same(taken.sequence, made[key])
        assert taken.about == {"number": key}
        assert store.nbytes <= 10 * EACH
        store.release(taken)
        store.flush()
    assert len(files_of(tmp_path)) >= 5


@pytest.mark.parametrize("lists_files", [True, False])
def test_a_restart_knows_what_there_was(tmp_path, lists_files):
    first = SequenceStore(10 * EACH, directory(tmp_path), lists_files=lists_files)
    for number in range(5):
        first.put(str(number), sequence(3, number), {"number": number})
        first.flush()
    first.close()
    second = SequenceStore(10 * EACH, directory(tmp_path), lists_files=lists_files)
    assert len(second) == (5 if lists_files else 0)
    if lists_files:
        assert second.get("3").nbytes == 3 * EACH
        assert [each.key for each in sorted(second.all(), key=lambda each: each.used)] == list("01234")
    for number in range(5):
        taken = second.take(str(number))
        assert same(taken.sequence, sequence(3, number))
        assert taken.about == {"number": number}
        second.release(taken)
    assert second.take("5") is None


@pytest.mark.parametrize("closes", [True, False])
def test_a_slow_disk_does_not_change_when_a_sequence_was_used(tmp_path, closes):
    class SlowFiles(Files):
        def save(self, sequence, path, *, note=""):
            time.sleep(0.03 if path.name.startswith("1.") else 0)
            super().save(sequence, path, note=note)

    first = SequenceStore(10 * EACH, directory(tmp_path, SlowFiles()))
    stored = [first.put(str(number), sequence(3, number), {}) for number in range(3)]
    for each in () if closes else stored:
        first.save(each)
        time.sleep(0.001)
    first.close()
    second = SequenceStore(10 * EACH, directory(tmp_path))
    assert [each.key for each in sorted(second.all(), key=lambda each: each.used)] == list("012")


def test_the_disk_is_bounded_by_what_is_used(tmp_path):
    size = 0
    for count in range(1, 9):
        store = SequenceStore(100 * EACH, directory(tmp_path, max_bytes=int(3.5 * size) or 2**30))
        store.save(store.put(str(count), sequence(3, count), {}))
        size = size or (tmp_path / "1.thing.safetensors").stat().st_size
        if count == 4:
            store.release(store.take("2"))
        store.close()
    assert files_of(tmp_path) == ["6", "7", "8"]
    store = SequenceStore(100 * EACH, directory(tmp_path, max_bytes=int(3.5 * size)))
    store.release(store.take("6"))
    store.save(store.put("9", sequence(3), {}))
    assert files_of(tmp_path) == ["6", "8", "9"]
    assert store.get("7") is None


def test_damaged_foreign_long_and_half_written_files(tmp_path, caplog):
    other = SequenceStore(100 * EACH, directory(tmp_path, Files("another model")))
    other.save(other.put("foreign", sequence(3), {}))
    other.close()
    first = SequenceStore(10**4 * EACH, directory(tmp_path))
    for key, tokens in (("good", 3), ("bad", 3), ("long", 1001)):
        first.save(first.put(key, sequence(tokens), {}))
    first.close()
    path = tmp_path / "bad.thing.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    (tmp_path / "empty.thing.safetensors").write_bytes(b"")
    (tmp_path / ".good.thing.safetensors.abc").write_bytes(b"half")
    caplog.set_level(logging.WARNING)
    second = SequenceStore(10**4 * EACH, directory(tmp_path))
    assert {each.key for each in second.all()} == {"good", "bad"}
    assert "too long for this engine" in caplog.text
    assert not (tmp_path / ".good.thing.safetensors.abc").exists()
    with pytest.raises(CacheFileError, match="damaged"):
        second.take("bad")
    assert second.get("bad") is None
    assert second.nbytes == 0  # nothing of it is left in use
    second.release(second.take("good"))
    second.sweep()
    assert files_of(tmp_path) == ["empty", "foreign", "good", "long"]


def test_a_full_disk_loses_only_what_is_evicted(tmp_path, caplog):
    files = Files()
    store = SequenceStore(10 * EACH, directory(tmp_path, files))
    files.fails = CacheFileError("No space left on device")
    stored = store.put("a", sequence(3), {})
    store.save(stored)
    assert not stored.on_disk
    store.release(store.take("a"))
    for key in "bcd":
        store.put(key, sequence(3), {})
        store.flush()
    assert store.take("a") is None
    assert "No space left on device" in caplog.text
    files.fails = None
    store.put("e", sequence(3), {})
    store.flush()
    store.release(store.take("b"))
    assert store.nbytes <= 10 * EACH


def test_a_disk_that_cannot_be_read_now_loses_nothing(tmp_path, monkeypatch):
    first = SequenceStore(10 * EACH, directory(tmp_path))
    first.put("a", sequence(3), {})
    first.close()
    files = Files()
    store = SequenceStore(10 * EACH, directory(tmp_path, files))

    def failing(path):
        raise CacheFileError("too many open files") from OSError("too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(files, "load", failing)
        with pytest.raises(CacheFileError, match="too many"):
            store.take("a")
    assert same(store.take("a").sequence, sequence(3))


def test_a_slow_disk_holds_no_more_than_a_quarter_besides(tmp_path, monkeypatch, caplog):
    place, gate = directory(tmp_path), threading.Event()
    write = place.write
    monkeypatch.setattr(place, "write", lambda *given: gate.wait(10) and write(*given))
    store = SequenceStore(12 * EACH, place)
    for number in range(12):
        store.put(str(number), sequence(3, number), {})
    held = sum(each.nbytes for each in store.all() if each.sequence is not None)
    assert held <= 18 * EACH  # the one that is being written, and the newest
    assert "more were evicted than the disk could write" in caplog.text
    # The queue holds nothing either: what is lost is gone.
    gc.collect()
    alive = [each for each in gc.get_objects() if isinstance(each, CompressedSequence) and each.groups is GROUPS]
    assert sum(each.nbytes for each in alive) <= 18 * EACH
    alive.clear()
    taken = store.take([*store._leaving][-1].key)  # before it was written
    gate.set()
    store.flush()
    assert same(taken.sequence, sequence(3, int(taken.key)))
    assert store.nbytes <= 12 * EACH


def test_a_directory_that_cannot_work_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"the thing directory .* cannot be created"):
        directory(tmp_path / "file" / "x")


KILLED = """
import sys
from pathlib import Path
from tests.cache.test_store import EACH, directory, sequence, SequenceStore
store = SequenceStore(10**6 * EACH, directory(Path(sys.argv[1])))
print("ready", flush=True)
number = 0
while True:
    store.save(store.put(str(number % 5), sequence(300, number), {"number": number}))
    number += 1
"""


def test_a_process_that_is_killed_while_it_writes_leaves_whole_files(tmp_path):
    rng = random.Random(0)
    for _ in range(6):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(rng.uniform(0.02, 0.15))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        store = SequenceStore(10**6 * EACH, directory(tmp_path))
        for left_behind in tmp_path.glob(".*"):
            assert left_behind.name.startswith(".tmp")  # of safetensors; it may be another program's
            os.utime(left_behind, (0, 0))
        directory(tmp_path)
        assert not list(tmp_path.glob(".*"))
        for each in store.all():
            taken = store.take(each.key)
            assert same(taken.sequence, sequence(300, taken.about["number"]))


def test_threads_and_chance(tmp_path):
    """Whatever is done at once: what is there is right, and bounds hold."""
    store = SequenceStore(40 * EACH, directory(tmp_path, max_bytes=2**16))
    problems, keys = [], [str(number) for number in range(20)]

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(300):
                key = rng.choice(keys)
                what = rng.random()
                if what < 0.4:
                    try:
                        made = store.put(key, sequence(rng.randrange(1, 12), int(key)), {"key": key}, users=1)
                    except StoreFullError:
                        continue
                    if what < 0.1:
                        store.save(made)
                    store.release(made)
                elif what < 0.45:
                    store.delete(key)
                else:
                    try:
                        taken = store.take(key)
                    except (StoreFullError, CacheFileError):  # full, or deleted meanwhile
                        continue
                    if taken is not None:
                        assert taken.about == {"key": key}
                        assert same(taken.sequence, sequence(len(taken.sequence.tokens), int(key)))
                        store.release(taken)
                assert store.nbytes <= 40 * EACH
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    store.flush()
    assert all(each.users == 0 for each in store.all())
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2**16
    store.close()


def test_what_is_being_written_is_not_lost(tmp_path, monkeypatch):
    """However much is evicted meanwhile."""
    place, begun, gate, written = directory(tmp_path), threading.Event(), threading.Event(), []
    write = place.write

    def slowly(key, *given):
        begun.set()
        assert gate.wait(10)
        written.append(key)
        return write(key, *given)

    monkeypatch.setattr(place, "write", slowly)
    store = SequenceStore(12 * EACH, place)
    for number in range(40):
        store.put(str(number), sequence(1, number), {})
        assert number < 12 or begun.wait(10)
    gate.set()
    store.flush()
    assert written[0] == "0"
    assert len(written) > 2
    assert set(written) <= set(files_of(tmp_path))
    assert same(store.take("0").sequence, sequence(1))


def test_deleted_while_it_is_written_and_made_again(tmp_path, monkeypatch):
    """The old one does not come back."""
    place, gate = directory(tmp_path), threading.Event()
    write = place.write
    monkeypatch.setattr(place, "write", lambda *given: gate.wait(10) and write(*given))
    store = SequenceStore(12 * EACH, place)
    old = store.put("a", sequence(3, 1), {})
    thread = threading.Thread(target=store.save, args=(old,))
    thread.start()
    store.delete("a")
    store.put("a", sequence(3, 2), {})
    gate.set()
    thread.join()
    assert not files_of(tmp_path)
    store.close()
    assert same(SequenceStore(12 * EACH, directory(tmp_path)).take("a").sequence, sequence(3, 2))


def is_interrupted(code, text):
    """In the store; Python handles no signal where a lock is given back, and the end of a use is not interrupted."""
    return code.co_filename.endswith(f"{os.sep}store.py") and code.co_name != "release" and not text.startswith("with ")


def test_an_interrupt_leaves_nothing_in_use(tmp_path):
    """At any line of a load from the disk."""
    first = SequenceStore(10 * EACH, directory(tmp_path))
    first.put("a", sequence(3), {})
    first.close()
    lines = 0
    for after in range(1, 400):
        store = SequenceStore(10 * EACH, directory(tmp_path))
        with Raise(KeyboardInterrupt(), after, is_interrupted) as shot:
            try:
                store.load("a")
            except KeyboardInterrupt:
                lines += 1
        assert all(each.users == 0 for each in store.all()), shot.where
        assert same(store.load("a"), sequence(3))
    assert 20 < lines < 300
