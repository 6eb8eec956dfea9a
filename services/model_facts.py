"""What memory planning must know of a model, served or not: from its config.json and the sizes of its files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from services.models import store
from worker.loader.config import parse_config
from worker.loader.errors import ModelError
from worker.loader.expected import fp8_bytes, num_parameters
from worker.loader.keys import Keys, read_json
from worker.loader.model import open_model
from worker.loader.safetensors import INDEX_FILE, SINGLE_FILE

STORED_KV = "float16"  # how a worker keeps the KV of weights that are stored in less than float32
WITHOUT_KV = ("linear_attention", "mamba", "recurrent", "conv")  # layer types that keep a state of fixed size


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """refusal: why this release does not serve the model; empty when it does.

    attention_layers: those with keys and values for each token; other_layers: those without, which keep a state
    for each sequence. parameters, stored_bytes: of the weights; None where nothing tells. fp8_bytes: what they are when
    the layers' matrices are in FP8; in_fp8: they are stored so. dtype: what the config names. context: the model's
    longest, in tokens.
    """

    name: str
    architecture: str
    refusal: str
    attention_layers: int
    other_layers: int
    kv_heads: int
    head_dim: int
    context: int
    dtype: str
    parameters: int | None
    stored_bytes: int | None
    fp8_bytes: int | None = None
    in_fp8: bool = False


def read_facts(model: str) -> ModelFacts:
    """Of a name in the store, a folder, a config.json or a GGUF file. ModelError says what is missing or wrong."""
    path = Path(model).expanduser()
    if path.suffix == ".json" and path.is_file():
        return _of_config(path, path.parent, model)
    path = Path(store.resolve(model))
    if path.is_dir():
        return _of_config(path / "config.json", path, model)
    files = open_model(path)
    facts = _of_config(files.config_file, None, model)
    entries = files.tensors.values()
    plain = all(entry.dtype == "F32" for entry in entries if len(entry.shape) == 2)
    stored = sum(entry.nbytes for entry in entries)
    return replace(facts, stored_bytes=stored, dtype="float32" if plain else STORED_KV)


def _of_config(file: Path, folder: Path | None, name: str) -> ModelFacts:
    data = read_json(file)
    stored = None if folder is None else _stored_bytes(folder)
    try:
        config = parse_config(data, str(file))
    except ModelError as error:
        return replace(_of_unserved(Keys(data=data, where=str(file)), stored, name), refusal=str(error))
    return ModelFacts(
        name=name,
        architecture=config.architecture,
        refusal="",
        attention_layers=config.num_layers,
        other_layers=0,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        context=config.max_position_embeddings,
        dtype=_dtype(Keys(data=data, where=str(file))),
        parameters=num_parameters(config),
        stored_bytes=stored,
        fp8_bytes=fp8_bytes(config),
        in_fp8=config.quantization is not None,
    )


def _of_unserved(keys: Keys, stored: int | None, name: str) -> ModelFacts:
    """From the keys that decoders have in common; those of the text model when there are others beside it."""
    named = keys.data.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else keys.text("model_type", "unknown")
    text = keys.mapping("text_config") or keys
    layers, heads = text.positive_int("num_hidden_layers"), text.positive_int("num_attention_heads")
    without = _layers_without_kv(text, layers)
    return ModelFacts(
        name=name,
        architecture=str(architecture),
        refusal="not served",
        attention_layers=layers - without,
        other_layers=without,
        kv_heads=text.positive_int("num_key_value_heads", heads),
        head_dim=text.positive_int("head_dim", max(1, text.positive_int("hidden_size") // heads)),
        context=text.positive_int("max_position_embeddings"),
        dtype=_dtype(text) if _dtype(text) != "auto" else _dtype(keys),
        parameters=None,
        stored_bytes=stored,
    )


def _layers_without_kv(keys: Keys, layers: int) -> int:
    """Layers whose state does not grow with the sequence: from layer_types, else from the interval between others."""
    types = keys.data.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or not all(isinstance(t, str) for t in types):
            raise keys.wrong("layer_types", f"must be a list of {layers} names, one for each layer")
        return sum(any(mark in name for mark in WITHOUT_KV) for name in types)
    if keys.has("full_attention_interval"):
        return layers - layers // keys.positive_int("full_attention_interval")
    return 0


def _dtype(keys: Keys) -> str:
    return keys.text("dtype", keys.text("torch_dtype", "auto"))


def _stored_bytes(folder: Path) -> int | None:
    """Bytes of the weights in a Hugging Face folder; None when there are none."""
    if (folder / INDEX_FILE).is_file():
        metadata = Keys(data=read_json(folder / INDEX_FILE), where=str(folder / INDEX_FILE)).mapping("metadata")
        if metadata is not None and metadata.has("total_size"):
            return metadata.positive_int("total_size")
    file = folder / SINGLE_FILE
    return file.stat().st_size if file.is_file() else None
