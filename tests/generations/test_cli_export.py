"""`powerguard checkpoints export|import`: the way to other tools and back, from the command line."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest

from powerguard.cli import run
from powerguard.generations import scan


def call(capsys, *arguments: object) -> tuple[int, str, str]:
    code = run(["checkpoints", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def saved(tmp_path):
    """(torch, the path of a sealed generation of step 5 in tmp_path/run)."""
    torch = pytest.importorskip("torch")
    from powerguard.checkpoint import Checkpointer

    with Checkpointer(tmp_path / "run") as saver:
        path = saver.save({"model": {"w": torch.arange(6.0).view(2, 3)}, "epoch": 3}, 5)
    return torch, path


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_export_to_each_format_and_back(saved, tmp_path, capsys, monkeypatch):
    """Each format is read by its own tool; what went to DCP comes back as a sealed generation of the same step."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    torch, path = saved
    monkeypatch.chdir(tmp_path)
    expected = torch.arange(6.0).view(2, 3)
    code, out, err = call(capsys, "export", tmp_path / "run", "--to", "dcp")
    assert (code, err) == (0, "")
    assert out.startswith(f"{path.name} exported to {tmp_path / path.name}.dcp; left out: random states of 1 ranks")
    state = {"model": {"w": torch.zeros(2, 3)}}
    dcp.load(state, checkpoint_id=tmp_path / f"{path.name}.dcp", no_dist=True)
    assert torch.equal(state["model"]["w"], expected)

    code, out, _ = call(capsys, "export", path, tmp_path / "x.pt", "--to", "torch", "--json")
    assert json.loads(out) == {
        "generation": path.name, "step": 5, "target": str(tmp_path / "x.pt"), "left_out": ["random states of 1 ranks"],
    }  # fmt: skip
    assert torch.equal(torch.load(tmp_path / "x.pt")["model"]["w"], expected)
    assert call(capsys, "export", path, tmp_path / "x.safetensors", "--to", "safetensors")[0] == 0
    assert torch.equal(load_file(tmp_path / "x.safetensors")["model.w"], expected)

    code, out, err = call(capsys, "import", tmp_path / f"{path.name}.dcp", tmp_path / "again")
    assert (code, err) == (0, "")
    assert "step 5" in out
    assert [(g.step, g.sealed, g.portable) for g in scan(tmp_path / "again")] == [(5, True, True)]


@pytest.mark.torch
def test_mistakes_are_one_line_and_a_code(saved, tmp_path, capsys):
    """Nothing is overwritten, what isn't there isn't exported, and a format must be named."""
    _, path = saved
    (tmp_path / "there").mkdir()
    for code, words, arguments in (
        (8, "exists already", ("export", path, tmp_path / "there", "--to", "dcp")),
        (12, "isn't there", ("export", tmp_path / "run" / "step-0000000009.x", tmp_path / "o", "--to", "dcp")),
        (12, "no whole generation", ("export", tmp_path / "none", tmp_path / "o", "--to", "dcp")),
        (2, "'--to'", ("export", path, tmp_path / "o")),
        (2, "'pickle' is not", ("export", path, tmp_path / "o", "--to", "pickle")),
        (12, "is no DCP checkpoint", ("import", tmp_path, tmp_path / "o")),
    ):
        got, _, err = call(capsys, *arguments)
        assert (got, err.count("\n"), words in err) == (code, 1, True), err
        assert not (tmp_path / "o").exists()


@pytest.fixture
def dcp(tmp_path):
    """A small checkpoint of torch.distributed.checkpoint that says its step: .metadata and one __0_0.distcp."""
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as saver

    state = {"model": {"w": torch.arange(6.0)}, "powerguard": {"step": 5, "unit": "step"}}
    saver.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def _cut(path):
    path.write_bytes(path.read_bytes()[:1000])


def _spoil(path):
    path.write_bytes(b"x" * len(path.read_bytes()))


def _list_in(path):
    path.write_bytes(pickle.dumps([1, 2]))


DAMAGE = [
    (".metadata", lambda path: path.write_bytes(b""), ".metadata: Ran out of input"),
    (".metadata", _spoil, ".metadata: invalid load key, 'x'"),
    (".metadata", _list_in, ".metadata: 'list' object has no attribute 'storage_meta'"),
    ("__0_0.distcp", _cut, "__0_0.distcp: it ends after 1000 of "),
    ("__0_0.distcp", lambda path: path.unlink(), "__0_0.distcp: No such file or directory"),
    ("__0_0.distcp", _spoil, "__0_0.distcp: Unsupported operand 120"),
]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize("damage", DAMAGE, ids=[says for _, _, says in DAMAGE])
def test_a_damaged_checkpoint_is_one_line(dcp, damage, tmp_path, capfd):
    """The file and what is wrong with it; torch's own log of it is nobody's to read, and nothing is made."""
    name, harm, says = damage
    harm(dcp / name)
    code, out, err = call(capfd, "import", dcp, tmp_path / "o")

    assert (12, "") == (code, out)
    assert f"powerguard: {dcp} can't be read as a DCP checkpoint: {says}" in err
    assert err.endswith("; copy it here anew, or name another one\n")
    assert 1 == err.count("\n")
    assert not (tmp_path / "o").exists()


@pytest.mark.torch
def test_advice_for_another_case_isnt_the_cause():
    """torch.load tells at length how to trust a file; what is wrong with this one comes after it."""
    pytest.importorskip("torch")
    from powerguard.train.dcp import WORDS_MAX, in_a_line

    long = "Weights only load failed. Try it.\nFile an issue: WeightsUnpickler error: \n\nUnsupported operand 80\n\nSee"
    assert "Unsupported operand 80" == in_a_line(RuntimeError(long))
    assert "reader failed: no directory" == in_a_line(RuntimeError("reader failed: no directory. This is an error"))
    assert "EOFError" == in_a_line(EOFError())
    assert WORDS_MAX == len(in_a_line(ValueError("x" * 999)))


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize("below", ["", "x/y"])
def test_a_target_that_is_no_directory(dcp, below, tmp_path, capsys):
    """It is named for what it is, before anything is read."""
    (tmp_path / "o").touch()
    code, _, err = call(capsys, "import", dcp, tmp_path / "o" / below)

    assert (8, 1) == (code, err.count("\n"))
    assert f"powerguard: {tmp_path / 'o'} isn't a directory; name the directory given to attach(dir=...)\n" == err


@pytest.mark.slow
def test_without_torch_it_says_what_to_install(make, tmp_path):
    """On a node without torch `list` works, and `export` is one line and exit code 14."""
    make(10)
    script = "import sys; sys.modules['torch'] = None; from powerguard.cli import run; sys.exit(run(sys.argv[1:]))"
    base = [sys.executable, "-c", script, "checkpoints"]
    done = subprocess.run([*base, "list", tmp_path], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(
        [*base, "export", tmp_path, "--to", "dcp"], check=False, capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr.count("\n")) == (14, 1)
    assert "torch isn't installed" in done.stderr
    assert "powerguard[node,train]" in done.stderr
