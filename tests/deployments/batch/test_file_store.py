"""The stores of files and batches: owners, expiry, and what interrupted calls leave."""

from __future__ import annotations

import os
import time

import pytest

from penstock.deployments.batch import batch_store, file_store
from penstock.deployments.batch.batch_store import (
    BatchSpec,
    BatchState,
    BatchStatus,
    BatchStore,
    TooManyBatches,
    new_batch_id,
)
from penstock.deployments.batch.file_store import FileStore, StoreFull, new_file_id


def stored(files, content=b"abc", ttl_s=100):
    with files.upload() as upload:
        upload.write(content)
        return upload.keep("in.jsonl", "batch", ttl_s)


@pytest.mark.parametrize("principal", ["", "a1", "../..", "a/b", "\x00", "x" * 5000])
def test_any_principal_has_a_folder_of_its_own_inside(tmp_path, principal):
    store = FileStore(tmp_path / "data")
    file = stored(store.of(principal))
    assert store.of(principal).get(file.id) == file
    assert store.of(principal + "!").get(file.id) is None
    assert {each.name for each in tmp_path.iterdir()} == {"data"}


def test_other_users_of_the_machine_read_neither_files_nor_batches(tmp_path):
    files = FileStore(tmp_path).of("")
    file = stored(files)
    batch = BatchStore(tmp_path).of("").create(spec(), files.path(file))
    for folder in (files.path(file).parent, batch.folder):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_an_upload_that_is_broken_off_leaves_nothing(tmp_path):
    files = FileStore(tmp_path).of("")
    with files.upload() as upload:
        upload.write(b"abc")
    assert list(tmp_path.rglob("file-*")) == []


def test_files_expire_and_the_sweep_removes_them_and_uploads_of_dead_processes(tmp_path):
    store = FileStore(tmp_path)
    files = store.of("")
    kept, over = stored(files), stored(files, ttl_s=-1)
    assert files.get(over.id) is None
    assert files.list() == [kept]
    dead, young = files.path(kept).with_name(new_file_id()), new_file_id()
    dead.write_bytes(b"half")
    os.utime(dead, (0, 0))
    files.path(kept).with_name(young).write_bytes(b"half")
    os.utime(files.path(kept), (0, 0))
    store.sweep()
    names = {each.name for each in tmp_path.rglob("file-*")}
    assert names == {kept.id, f"{kept.id}.json", young}


def test_an_owner_has_no_more_than_its_room(tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "MAX_OWNER_FILES", 2)
    monkeypatch.setattr(file_store, "MAX_OWNER_BYTES", 10)
    store = FileStore(tmp_path)
    files = store.of("")
    stored(files)
    files.check_room(7)
    with pytest.raises(StoreFull, match="delete some"):
        files.check_room(8)
    stored(files)
    with pytest.raises(StoreFull, match="2 files"):
        files.check_room(0)
    store.of("another").check_room(10)


def test_a_result_is_adopted_once_however_often(tmp_path):
    files = FileStore(tmp_path / "data").of("")
    source, file_id = tmp_path / "out", new_file_id()
    source.write_bytes(b"abc\n")
    stored(files)
    # A process that ended between the content and its record.
    files.path(files.list()[0]).with_name(file_id).write_bytes(b"")
    first = files.adopt(file_id, source, "out.jsonl", 100)
    assert files.adopt(file_id, source, "out.jsonl", 100) == first
    assert files.path(first).read_bytes() == b"abc\n"
    assert first.num_bytes == 4


def spec(number=0):
    now = int(time.time())
    return BatchSpec(new_batch_id(), "", "/v1/completions", "file", "24h", now, now + 86400)


def test_a_batch_is_created_whole_or_not_at_all(tmp_path, monkeypatch):
    store = BatchStore(tmp_path)
    with pytest.raises(FileNotFoundError):
        store.of("").create(spec(), tmp_path / "missing")
    assert store.unfinished() == []
    assert list(tmp_path.rglob("batch_*")) == []
    content = tmp_path / "content"
    content.write_bytes(b"x")
    monkeypatch.setattr(batch_store, "MAX_UNFINISHED", 2)
    made = [store.of("").create(spec(), content) for _ in range(2)]
    with pytest.raises(TooManyBatches, match="cancel one"):
        store.of("").create(spec(), content)
    made[0].write(BatchState().to(BatchStatus.FAILED))
    store.of("").create(spec(), content)
    assert len(store.unfinished()) == 2
    assert len(store.of("").list()) == 3


def test_a_cancel_shows_until_the_batch_has_ended(tmp_path):
    content = tmp_path / "content"
    content.write_bytes(b"x")
    batch = BatchStore(tmp_path).of("").create(spec(), content)
    batch.cancel()
    at = batch.cancelled_at()
    batch.cancel()
    assert batch.cancelled_at() == at
    assert batch.state().status is BatchStatus.CANCELLING
    assert batch.recorded().status is BatchStatus.VALIDATING
    batch.write(BatchState().to(BatchStatus.IN_PROGRESS))
    assert batch.state().status is BatchStatus.CANCELLING
    assert batch.state().times["cancelling"] == at
    batch.write(BatchState().to(BatchStatus.FINALIZING))
    assert batch.state().status is BatchStatus.FINALIZING
    batch.write(BatchState().to(BatchStatus.COMPLETED))
    assert batch.state().status is BatchStatus.COMPLETED


def test_batches_that_ended_long_ago_are_removed(tmp_path):
    content = tmp_path / "content"
    content.write_bytes(b"x")
    store = BatchStore(tmp_path)
    made = [store.of("").create(spec(), content) for _ in range(3)]
    for batch in made[:2]:
        batch.write(BatchState().to(BatchStatus.COMPLETED))
    for batch in made[1:]:
        os.utime(batch.folder, (0, 0))
    store.sweep()
    assert {each.spec.id for each in store.of("").list()} == {made[0].spec.id, made[2].spec.id}
