"""NEFF files: what is in them, that they are the same everywhere, and that the reader holds them to it."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import numpy as np
import pytest

from opennki.errors import NkiError, NkiFileError, NkiParseError
from opennki.ir.print import to_text
from opennki.toolchain import neff
from opennki.passes.program import Streams
from opennki.toolchain.container import dump, pack, unpack
from opennki.toolchain.nrt import NrtClient
from tests.toolchain.kernels import A, B, compiled, traced


def changed(**files):
    """The NEFF of `add` with some files changed, and all checksums right."""
    archive = unpack(neff.NEFF, compiled().neff)
    manifest = {**archive.manifest, **files.pop("manifest", {})}
    return pack(neff.NEFF, manifest, {name: files.get(name.partition(".")[0], data) for name, data in archive.files.items()})


def test_what_is_in_it():
    made = neff.parse(compiled().neff)
    assert (made.func_name, made.target) == ("add", "trn1")
    assert [i["name"] for i in made.signature["inputs"]] == ["a", "b"]
    assert to_text(made.kernel()) == to_text(traced())
    assert made.timing["latency_us"] > 0 and made.timing["metrics"]["total_time"] == pytest.approx(made.timing["latency_us"] * 1e-6)
    assert "estimate" in made.timing["estimate"]
    assert "not loadable by AWS" in made.archive.manifest["notice"]
    assert made.part(neff.PLACEMENT)["memories"]["sbuf"]["tensors"]


def test_the_bytes_are_those_of_the_kernel_alone():
    from opennki.ir.locations import locations_text
    from opennki.toolchain.compile import Source, compile_kernel

    again = traced()
    data = compile_kernel(Source(again, to_text(again), locations_text(again))).neff
    assert data == compiled().neff
    assert str(Path(__file__).parent).encode() not in data, "a path of this machine is in the file"


def test_source_lines_come_back_where_the_folder_is_known():
    made = neff.parse(compiled().neff)
    here = made.kernel(str(Path(__file__).parent))
    assert {loc.file for loc in here.locs if loc.line} == {str(Path(__file__).parent / "kernels.py")}
    assert all(loc.file.startswith("<") for loc in made.kernel().locs)


@pytest.mark.parametrize("change, words", [
    ({"manifest": {"func_name": "other"}}, "func_name"), ({"manifest": {"target": "trn2"}}, "target"),
    ({"manifest": {"has_collectives": True}}, "has_collectives"), ({"manifest": {"signature": {}}}, "signature"),
    ({"manifest": {"func_name": 3}}, "func_name"), ({"manifest": {"signature": None}}, "signature"),
    ({"timing": b"{}"}, "latency"), ({"timing": b'{"latency_us": -1.0, "metrics": {}}'}, "latency"),
    ({"timing": b'{"latency_us": "1", "metrics": {}}'}, "latency"), ({"timing": b"[]"}, "latency"),
    ({"kernel": b"import os\n"}, ""), ({"kernel": b""}, ""), ({"kernel": b"\xff\xfe"}, ""),
    ({"kernel": b"opennki_ir = 99\n"}, "version"), ({"locations": b"{}"}, "locations"), ({"locations": b"\xff"}, "locations"),
])
def test_contents_that_do_not_fit_are_refused(change, words):
    with pytest.raises(NkiParseError, match=words):
        neff.parse(changed(**change)).kernel()


def test_a_kernel_larger_than_any_machine_is_refused():
    text = to_text(traced()).replace("(128, 16)", "(1048576, 1048576)")
    with pytest.raises(NkiError, match="bytes"):
        neff.parse(changed(kernel=text.encode())).kernel()


def test_no_content_gets_further_than_an_error():
    """Fixed budget: each part in turn gets random damage under right checksums; loading and running it is an NkiError or works."""
    rng = random.Random(7)
    archive = unpack(neff.NEFF, compiled().neff)
    parts = list(archive.files)
    ends = time.monotonic() + 30  # a guard, far above what the budget takes
    refused = 0
    for _ in range(300):
        name = rng.choice(parts[:1] * 4 + parts)
        data = bytearray(archive.files[name])
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data) + 1)
            kind = rng.randrange(4)
            if kind == 0:
                data[at:at] = rng.choice([b"(", b"]", b"9" * 30, b"-1", b"\n", b"__import__", b"0", b"{", b'"', b"\0"])
            elif kind == 1:
                del data[at : at + rng.randrange(1, 20)]
            elif kind == 2 and at < len(data):
                data[at] = rng.randrange(256)
            else:
                data[at:at] = data[rng.randrange(len(data) + 1) :][:40]
        try:
            made = neff.parse(changed(**{name.partition(".")[0]: bytes(data)}))
            made.kernel()
            made.part(neff.STREAMS)
            with NrtClient() as client:
                client.try_lock_device()
                client.modelLoad(made)
                client.modelExecute([A, B])
        except (NkiError, IndexError) as error:
            assert isinstance(error, NkiError) or isinstance(error.__cause__, NkiError)
            refused += 1
        assert time.monotonic() < ends
    assert refused > 100


def test_files_that_are_no_neff(tmp_path):
    for name, data in {"empty": b"", "text": b"hello", "zip": b"PK\x05\x06" + bytes(18), "cut": compiled().neff[:700]}.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(NkiParseError, match=name):
            neff.load(path)
    with pytest.raises(NkiFileError, match="No such file"):
        neff.load(tmp_path / "missing.neff")
    with pytest.raises(NkiFileError, match=r"regular file|directory"):
        neff.load(tmp_path)
    with pytest.raises(NkiFileError, match="no regular file"):
        neff.load("/dev/null")


def test_a_named_pipe_is_not_waited_for(tmp_path):
    import os

    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(NkiFileError, match="no regular file"):
        neff.load(path)


def test_it_runs():
    with NrtClient() as client:
        client.try_lock_device()
        client.modelLoad(compiled().neff)
        np.testing.assert_array_equal(client.modelExecute({"a": A, "b": B})[client.outputs[0].name], A + B)


def test_the_streams_of_the_file_run_and_each_semaphore_is_needed():
    """What the compiler wrote is what is checked: a file without one of its semaphores is found out."""
    made = neff.parse(compiled().neff)
    made.check_streams([A, B])
    streams = Streams.from_json(made.part(neff.STREAMS))
    assert streams.semaphores
    for semaphore in streams.semaphores:
        broken = changed(streams=dump(streams.without(semaphore.number).to_json()))
        with pytest.raises(NkiError, match=r"race|wait|deadlock|before") as caught:
            for order in range(20):
                neff.parse(broken).check_streams([A, B], str(Path(__file__).parent), order=order)
        assert "kernels.py" in str(caught.value)


def test_the_runtime_checks_streams_where_the_setting_says_so(monkeypatch):
    streams = Streams.from_json(neff.parse(compiled().neff).part(neff.STREAMS))
    broken = changed(streams=dump(streams.without(streams.semaphores[0].number).to_json()))
    with NrtClient() as client:
        client.try_lock_device()
        client.modelLoad(broken)
        client.modelExecute([A, B])
        monkeypatch.setenv("OPENNKI_CHECK_STREAMS", "1")
        with pytest.raises(NkiError):
            for _ in range(20):
                client.modelExecute([A, B])
        client.modelLoad(compiled().neff)
        np.testing.assert_array_equal(next(iter(client.modelExecute([A, B]).values())), A + B)
    with pytest.raises(NkiParseError, match="options"):
        neff.parse(changed(manifest={"options": {}})).check_streams([A, B])


def test_the_bir_says_the_same():
    bir = json.loads(compiled().bir)
    made = neff.parse(compiled().neff)
    assert (bir["func_name"], bir["signature"]) == ("add", made.signature)
    assert bir["streams"] == made.part(neff.STREAMS) and bir["placement"] == made.part(neff.PLACEMENT)
