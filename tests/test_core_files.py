"""Files are whole or absent; results hold no NaN."""
import json
import os
import stat
import threading

import numpy as np
import pytest

from peira_krepes.core.files import atomic_path, bytes_digest, file_digest, write_json


def listing(folder): return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("wrote", [True, False])
def test_nothing_is_left_and_the_old_file_stays(tmp_path, error, wrote):
    (tmp_path/"a.txt").write_text("old")
    with pytest.raises(error):
        with atomic_path(tmp_path/"a.txt") as p:
            if wrote: p.write_text("half")
            raise error
    assert listing(tmp_path) == ["a.txt"] and (tmp_path/"a.txt").read_text() == "old"


def test_temporary_is_a_sibling_with_the_same_ending(tmp_path):
    with atomic_path(tmp_path/"new"/"a.npz") as p:
        assert p.parent == tmp_path/"new" and p.suffix == ".npz" and p.name.startswith(".") and not (tmp_path/"new"/"a.npz").exists()
        np.savez(p, x=np.arange(3))
    assert listing(tmp_path/"new") == ["a.npz"] and np.load(tmp_path/"new"/"a.npz")["x"].tolist() == [0, 1, 2]


def test_readers_never_meet_half_a_file(tmp_path):
    target, texts, seen, done = tmp_path/"a.txt", ("x" * 200_000, "y" * 300_000), set(), threading.Event()
    target.write_text(texts[0])
    def read():
        while not done.is_set(): seen.add(target.read_text())
    reader = threading.Thread(target=read); reader.start()
    for k in range(40):
        with atomic_path(target) as p: p.write_text(texts[k % 2])
    done.set(); reader.join()
    assert seen and seen <= set(texts)


def test_folders_links_and_permissions(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder"):
        with atomic_path(tmp_path): pass
    with pytest.raises(FileNotFoundError, match="nothing was written"):
        with atomic_path(tmp_path/"a"): pass
    (tmp_path/"real").mkdir(); (tmp_path/"real"/"a").write_text("old"); (tmp_path/"link").symlink_to(tmp_path/"real"/"a")
    with atomic_path(tmp_path/"link") as p: p.write_text("new")
    assert (tmp_path/"link").is_symlink() and (tmp_path/"real"/"a").read_text() == "new" and listing(tmp_path/"real") == ["a"]
    umask = os.umask(0); os.umask(umask)
    assert stat.S_IMODE((tmp_path/"real"/"a").stat().st_mode) == 0o666 & ~umask


def test_json_round_trip(tmp_path):
    obj = {"a": [1, 2.5, None, True, "é"], "b": {"c": []}, "third": 1 / 3}
    assert write_json(tmp_path/"x"/"r.json", obj) == tmp_path/"x"/"r.json"
    text = (tmp_path/"x"/"r.json").read_text(encoding="utf-8")
    assert json.loads(text) == obj and text.startswith('{\n "a"') and text.endswith("}\n") and "é" in text


@pytest.mark.parametrize("obj, words", [
    ({"runs": [{"loss": 0.0}, {"loss": float("nan")}]}, r"\$\.runs\[1\]\.loss is nan"), ([[float("inf")]], r"\$\[0\]\[0\] is inf"),
    ({"a": (1.0, np.float64("nan"))}, r"\$\.a\[1\] is nan")])
def test_json_names_the_bad_value(tmp_path, obj, words):
    write_json(tmp_path/"r.json", {"old": 1})
    with pytest.raises(ValueError, match=words): write_json(tmp_path/"r.json", obj)
    assert listing(tmp_path) == ["r.json"] and json.loads((tmp_path/"r.json").read_text()) == {"old": 1}


@pytest.mark.parametrize("obj, words", [({"a": np.float32(1)}, r"\$\.a is a numpy\.float32"), ({"a": {2: 1}}, r"\$\.a has the key 2"), ([{1}], r"\$\[0\] is a builtins\.set")])
def test_json_refuses_what_does_not_come_back(tmp_path, obj, words):
    with pytest.raises(TypeError, match=words): write_json(tmp_path/"r.json", obj)
    assert listing(tmp_path) == []


def test_digests_are_sha256(tmp_path):
    (tmp_path/"f").write_bytes(b"abc")
    assert file_digest(tmp_path/"f") == bytes_digest(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert bytes_digest(np.zeros(2, dtype=np.uint8)) == bytes_digest(b"\0\0")
