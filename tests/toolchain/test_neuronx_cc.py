"""The compiler as a command: its options, exit statuses and messages, and that it leaves nothing half-written."""

from __future__ import annotations

import base64
import json
import os
import random
import re
import subprocess
import sys

import pytest

from opennki import settings
from opennki.errors import NkiError
from opennki.ir.locations import locations_text
from opennki.ir.print import to_text
from opennki.toolchain import compile as driver
from opennki.toolchain import neff, neuronx_cc
from tests.kernels.payloads import config_of
from tests.kernels.test_payload_hostile import changed
from tests.toolchain.kernels import compiled, traced
from tests.trace.test_golden_ir import CASES

COMMAND = ["compile", "--framework", "XLA", "penguin.py", "--internal-tensorizer-opt-level=nki", "--pipeline", "compile", "SaveTemps",
           "--target", "trn1"]


@pytest.fixture
def source(alone):
    driver.write_tensorizer_ir(alone, traced())
    return alone


def run(*words, capsys=None):
    return neuronx_cc.main([*COMMAND, *words])


def test_the_command_of_the_baremetal_kernel_compiles(source, capsys):
    assert run() == 0
    files = ["add.TensorizerBIR.json", "file.neff", "log-neuron-cc.txt", "penguin.locations.json", "penguin.py"]
    assert sorted(os.listdir(source)) == files
    assert (source / "file.neff").read_bytes() == compiled().neff
    assert (source / "add.TensorizerBIR.json").read_bytes() == compiled().bir
    assert capsys.readouterr() == ("", "")
    log = (source / "log-neuron-cc.txt").read_text()
    for word in ("verify", "allocate", "schedule", "time", "wrote file.neff"):
        assert word in log


def test_as_a_process(source):
    done = subprocess.run([*settings.Settings().neuronx_cc, *COMMAND], env=settings.own_environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert neff.load("file.neff").func_name == "add"
    done = subprocess.run([*settings.Settings().neuronx_cc, "--version"], env=settings.own_environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "opennki" in done.stdout


def test_without_save_temps_there_is_the_neff_alone(source):
    words = [w for w in COMMAND if w != "SaveTemps"]
    assert neuronx_cc.main([*words, "--output", "out.neff", "--logfile", "log"]) == 0
    assert sorted(os.listdir(source)) == ["log", "out.neff", "penguin.locations.json", "penguin.py"]


def test_the_text_alone_is_enough(source):
    (source / "penguin.locations.json").unlink()
    assert run() == 0
    assert neff.load("file.neff").kernel().name == "add"


def test_verbose_writes_to_standard_output(source, capsys):
    assert run("--verbose", "info") == 0
    out, err = capsys.readouterr()
    assert "allocate:" in out and err == ""


@pytest.mark.parametrize("words", [
    "--model-type transformer", "--auto-cast=none", "--auto-cast matmult --auto-cast-type bf16", "--logical-nc-config=1", "-lnc 2",
    "--lnc=1", "-O1", "-O 3", "--optlevel 2", "--disable-dge", "--disable-internal-io-dge --internal-skip-backend-allocation-opt-nki",
    "--distribution-strategy llm-training", "--enable-mixed-precision-accumulation", "--enable-saturate-infinity",
    "--enable-fast-loading-neuron-binaries", "--tensorizer-options='-x y'", "--internal-nki-allocator stack --internal-nki-skip-middle-end",
])
def test_options_of_the_vendor_that_do_no_harm_are_taken(source, words):
    import shlex

    assert run(*shlex.split(words)) == 0


@pytest.mark.parametrize("words, message", [
    (["--no-such-option"], "--no-such-option"), (["--auto-cast=some"], "some"), (["--target", "trn9"], "trn9"), (["--optlevel", "7"], "7"),
    (["--framework", "TENSORFLOW"], "TENSORFLOW"), (["--pipeline", "link"], "link"), (["--pipeline", "SaveTemps"], "SaveTemps"),
    (["--internal-tensorizer-opt-level=3"], "only nki"), (["--verbose", "loud"], "loud"), (["other.py"], "other.py"),
    (["--output"], "--output"), (["--aut", "none"], "--aut"),
])
def test_a_wrong_command_line_is_status_2(source, capsys, words, message):
    before = sorted(os.listdir(source))
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert message in err and "neuronx-cc compile --help" in err and out == "" and "Traceback" not in err
    assert sorted(os.listdir(source)) == before


@pytest.mark.parametrize("words", [[], ["link"], ["compile"], ["compile", "penguin.py"], ["list-operators"]])
def test_commands_that_lack_something_are_status_2(capsys, words):
    assert neuronx_cc.main(words) == 2
    assert "neuronx-cc: " in capsys.readouterr().err


def test_help_names_every_option(capsys):
    assert neuronx_cc.main(["compile", "--help"]) == 0
    text = capsys.readouterr().out
    for names, _, _ in neuronx_cc.ACCEPTED:
        assert names[0] in text
    for name in ("--framework", "--target", "--output", "--pipeline", "--logfile", "--verbose", "--internal-tensorizer-opt-level"):
        assert name in text
    assert neuronx_cc.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "compile" in text and "list-operators" in text and "Exit status" in text


def test_list_operators(capsys):
    assert neuronx_cc.main(["list-operators", "--framework", "XLA"]) == 0
    names = capsys.readouterr().out.split("\n")
    assert "nc_matmul" in names and names[:-1] == sorted(names[:-1])


def failed(source, capsys, words=(), status=1):
    """The message of a compilation that fails, which leaves the older NEFF as it is."""
    (source / "file.neff").write_bytes(b"older")
    before = {name for name in os.listdir(source)}
    assert run(*words) == status
    assert (source / "file.neff").read_bytes() == b"older"
    assert set(os.listdir(source)) - before <= {"log-neuron-cc.txt"}
    err = capsys.readouterr().err
    assert "Traceback" not in err and err.startswith("neuronx-cc: ")
    return err


@pytest.mark.parametrize("text, message", [
    (b"", "cut short"), (b"import os\nos.system('touch hacked')\n", "opennki_ir"), (b"opennki_ir = 2\n", "version"),
    (b"\xff\xfe\0", "unexpected character"), (b"opennki_ir = 1\nkernel('x', target='trn1')\n", "cut short"),
    (b"opennki_ir = 1\nkernel('x', target='trn7')\noutputs()\n", "trn7"), (b"(" * 100000, ""),
])
def test_a_damaged_text_is_an_error_at_its_line(source, capsys, text, message):
    (source / "penguin.py").write_bytes(text)
    (source / "penguin.locations.json").unlink()
    err = failed(source, capsys)
    assert message in err and err.startswith("neuronx-cc: penguin.py:") and "artifacts_dir" in err
    assert not os.path.exists("hacked")


def test_every_cut_of_the_text_is_an_error(source, capsys):
    text = (source / "penguin.py").read_bytes()
    (source / "penguin.locations.json").unlink()
    for end in range(0, len(text) - 2, 7):
        (source / "penguin.py").write_bytes(text[:end])
        assert failed(source, capsys)


def test_changed_texts_are_compiled_or_refused():
    """Fixed budget: names, numbers and words of IR texts changed at random; what is read is placed, scheduled and timed, or an NkiError."""
    kernels = [config_of(), *(config_of(*CASES[name]) for name in ("matmul", "gather", "programs", "edge"))]
    rng, read, made = random.Random(11), 0, 0
    for _ in range(1000):
        raw, config = rng.choice(kernels)
        try:
            text = json.loads(base64.b64decode(changed(rng, raw, config)))["serialize_ir_string"].encode("ascii")
        except (ValueError, KeyError, AttributeError, TypeError):
            continue
        try:
            kernel = neff.read_kernel(text, None, "")
            read += 1
            driver.compile_kernel(driver.Source(kernel, to_text(kernel), locations_text(kernel)))
            made += 1
        except NkiError as error:
            assert str(error)
    assert read > 20 and made > 15


def test_damaged_locations_are_an_error(source, capsys):
    for data in (b"", b"[]", b"{}", b'{"folder": 3, "locations": "{}"}', b'{"folder": "", "locations": "{"}', b"[" * 9999):
        (source / "penguin.locations.json").write_bytes(data)
        assert "locations" in failed(source, capsys)


def test_another_target_than_the_traced_one_is_an_error(source, capsys):
    err = failed(source, capsys, ["--target", "trn2"])
    assert "traced for trn1" in err and "--target trn1" in err
    assert run("--target", "inf2") == 1 or neff.load("file.neff")


def test_files_of_models_are_refused(source, capsys):
    (source / "model.hlo").write_bytes(b"HloModule x")
    words = [w if w != "penguin.py" else "model.hlo" for w in COMMAND]
    assert neuronx_cc.main(words) == 1
    assert "not the IR text of a kernel" in capsys.readouterr().err


def test_files_that_are_not_there(source, capsys):
    (source / "penguin.py").unlink()
    assert "No such file" in failed(source, capsys)
    (source / "penguin.py").mkdir()
    assert "penguin.py" in failed(source, capsys)


def test_an_output_that_cannot_be_written(source, capsys):
    assert run("--output", "missing/out.neff") == 1
    assert "cannot write" in capsys.readouterr().err
    (source / "blocked").mkdir()
    assert run("--output", "blocked") == 1
    assert "cannot write the NEFF" in capsys.readouterr().err
    assert os.listdir("blocked") == [] and not [n for n in os.listdir(source) if n.startswith(".")]


def test_a_log_that_cannot_be_written_is_a_warning(source, capsys):
    assert run("--logfile", "missing/log") == 0
    assert "warning" in capsys.readouterr().err and (source / "file.neff").exists()


def test_a_function_name_cannot_lead_elsewhere(source, capsys):
    text = (source / "penguin.py").read_text().replace("kernel('add'", "kernel('../../up'")
    (source / "penguin.py").write_text(text)
    status = run()
    assert status in (0, 1)
    assert not [n for n in os.listdir(source.parent.parent) if "up" in n and n.endswith(".json")]
    if status == 0:
        assert [n for n in os.listdir(source) if re.fullmatch(r"[A-Za-z0-9_]+\.TensorizerBIR\.json", n)]


def test_an_internal_error_is_one_line_and_a_log(source, capsys, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("oh")

    monkeypatch.setattr(driver, "allocate", broken)
    err = failed(source, capsys, status=70)
    assert "internal error: RuntimeError: oh" in err and "log-neuron-cc.txt" in err
    assert "Traceback" in (source / "log-neuron-cc.txt").read_text()


def test_the_words_of_python_do_not_run(source):
    """The text is Python in form only: a process that compiles it imports nothing from its folder."""
    (source / "numpy.py").write_text("raise SystemExit('imported from the work directory')")
    done = subprocess.run([*settings.Settings().neuronx_cc, *COMMAND], env=settings.own_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sys.executable == settings.Settings().neuronx_cc[0]
