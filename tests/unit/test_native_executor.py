"""The native engine as a whole: against the torch engine on the same weights, and bit for bit against itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from structlog.testing import capture_logs

from proto.messages import FinishReason, SamplingParams
from services.models import store
from tests.support import gguf_files
from tests.support.checkpoints import write_small_files
from tests.support.gguf_files import small_tensors, write_gguf
from tests.support.plans import Driver, Sequence
from tests.support.runners import serial_runner
from worker.config import WorkerConfig
from worker.cpu.native import build
from worker.cpu.native import weights as packing
from worker.cpu.native.availability import VARIABLE
from worker.errors import ConfigError
from worker.loader.config import parse_config
from worker.loader.expected import expected_tensors
from worker.loader.super_blocks import SUPER_BLOCKS
from worker.runner import Runner

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA3, "attention_bias": True, "mlp_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 40},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 24},
}
BASE = {
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(3, 300, size).tolist() for size in (1, 5, 70, 110, 17)]


def checkpoint(folder: Path, name: str, **changes: Any) -> Path:
    """Random weights of one architecture."""
    config = BASE | ARCHITECTURES[name] | changes
    folder.mkdir()
    write_small_files(folder, config)
    rng, tensors = np.random.default_rng(3), {}
    for tensor, shape in expected_tensors(parse_config(config, "test")).items():
        spread = 1.0 / shape[-1] ** 0.5 if len(shape) == 2 else 0.2
        tensors[tensor] = (rng.standard_normal(shape) * spread).astype(np.float32)
        if len(shape) == 1 and tensor.endswith("norm.weight"):
            tensors[tensor] += 1.0
    tensors["model.embed_tokens.weight"] *= 20.0
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(engine: str, model: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Runner:
    monkeypatch.setenv(VARIABLE, engine)
    defaults: dict[str, Any] = {"threads": 1, "max_rows": 8, "max_step_tokens": 256, "kv_cache_memory": 2**21}
    return serial_runner(WorkerConfig(model=model, **(defaults | settings)))


def everything(runner: Runner, *, budget: int | None = None, params: SamplingParams | None = None) -> list[Sequence]:
    """All prompts in one changing batch, with all logprobs."""
    driver = Driver(runner, budget=budget)
    params = params or SamplingParams(logprobs=3, prompt_logprobs=3)
    found = [driver.add(prompt, max_tokens=12, seed=i, params=params) for i, prompt in enumerate(PROMPTS)]
    driver.run()
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_float32_weights_give_what_torch_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = checkpoint(tmp_path / "model", name)
    native = everything(load("native", model, monkeypatch, threads=2))
    other = everything(load("torch", model, monkeypatch))
    for ours, theirs in zip(native, other, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.logprobs.keys() == theirs.logprobs.keys()
        for position, entry in ours.logprobs.items():
            assert abs(entry.value - theirs.logprobs[position].value) < 2e-4
            assert entry.rank == theirs.logprobs[position].rank


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_batches_chunks_and_threads_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = checkpoint(tmp_path / "model", name)
    one = load("native", model, monkeypatch)
    same(one, load("native", model, monkeypatch, threads=3, max_step_tokens=64), everything(one))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16"])
def test_stored_formats_change_no_bit_in_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model = stored(tmp_path, kind)
    one = load("native", model, monkeypatch)
    same(one, load("native", model, monkeypatch, threads=3, max_step_tokens=64), everything(one))


def same(one: Runner, other: Runner, expected: list[Sequence]) -> None:
    """Alone, in chunks of 7, and on other threads: equal tokens and logprobs to the last bit."""
    runs = [everything(one, budget=7), everything(other), everything(other, budget=33)]
    driver = Driver(one)
    alone = []
    for index, sequence in enumerate(expected):
        alone.append(driver.add(sequence.prompt, max_tokens=12, seed=index, params=sequence.params))
        driver.run()
    for run in (*runs, alone):
        for ours, theirs in zip(run, expected, strict=True):
            assert ours.tokens == theirs.tokens
            assert ours.logprobs == theirs.logprobs


def test_sampled_tokens_are_those_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint(tmp_path / "model", "llama")
    params = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.2, min_tokens=4)
    native = everything(load("native", model, monkeypatch), params=params)
    other = everything(load("torch", model, monkeypatch), params=params)
    assert [sequence.tokens for sequence in native] == [sequence.tokens for sequence in other]


@pytest.fixture(autouse=True)
def _wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Super-blocks need rows of a multiple of 256 values."""
    kind = getattr(request.node, "callspec", None) and request.node.callspec.params.get("kind")
    if kind in SUPER_BLOCKS:
        for name, size in (("HIDDEN", 256), ("INNER", 256), ("HEADS", 16), ("KV_HEADS", 4)):
            monkeypatch.setattr(gguf_files, name, size)


def stored(folder: Path, kind: str) -> Path:
    return write_gguf(folder / f"{kind}.gguf", "llama", small_tensors("llama"), dtype=kind)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"])
def test_quantised_weights_keep_the_likelihood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Against the same weights in float32: only the activations' quantisation is between them."""
    tensors = {name: value * (0.1 if value.ndim == 2 else 1.0) for name, value in small_tensors("llama").items()}
    model = write_gguf(tmp_path / "model.gguf", "llama", tensors, dtype=kind)
    text = np.random.default_rng(0).integers(4, 300, 120).tolist()
    params = SamplingParams(prompt_logprobs=0)

    def mean(dtype: str) -> float:
        driver = Driver(load("native", model, monkeypatch, dtype=dtype))
        sequence = driver.add(text, max_tokens=1, params=params)
        driver.run()
        return -float(np.mean([sequence.logprobs[position].value for position in range(1, len(text))]))

    assert abs(mean("auto") / mean("float32") - 1) < 0.005


def test_nan_in_one_row_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(load("native", stored(tmp_path, "Q8_0"), monkeypatch))
    alone = driver.add(PROMPTS[1], max_tokens=12)
    driver.run()
    bad, good = driver.add(PROMPTS[2], max_tokens=12), driver.add(PROMPTS[1], max_tokens=12)
    driver.step()
    driver.poison(bad.blocks)
    driver.run()
    assert (bad.reason, len(bad.output)) == (FinishReason.NOT_FINITE, 1)
    assert good.output == alone.output


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, in which weights of any size are kept; the library stays the one that is built."""
    monkeypatch.setattr(build, "PREBUILT", build.library().parents[2])
    monkeypatch.setenv("SIGNALBOX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packing, "KEPT_FROM", 0)
    return tmp_path / "cache"


def test_packed_weights_are_kept_and_mapped(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stored(tmp_path, "Q4_1")
    first = everything(load("native", model, monkeypatch))
    (file,) = (cache / "packed").glob("*.bin")
    written = file.stat().st_mtime_ns
    assert everything(load("native", model, monkeypatch))[3].logprobs == first[3].logprobs
    assert file.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("settings", "named"), [({"dtype": "bfloat16"}, "--dtype bfloat16"), ({"block_size": 8}, "--block-size 8")]
)
def test_what_only_torch_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], named: str
) -> None:
    model = checkpoint(tmp_path / "model", "qwen2")
    with pytest.raises(ConfigError, match=named):
        load("native", model, monkeypatch, **settings)
    assert load("auto", model, monkeypatch, **settings).hello("w").device.startswith("cpu (torch ")


def test_the_engine_is_named_and_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stored(tmp_path, "Q4_1")
    assert load("auto", model, monkeypatch).hello("w").device == (
        f"cpu (native {build.level()}, 1 threads, q4_1 weights, float16 kv)"
    )
    with pytest.raises(ConfigError, match=f"{VARIABLE} must be auto, native or torch, is 'fast'"):
        load("fast", model, monkeypatch)


def test_a_folder_is_quantised_at_load(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint(tmp_path / "model", "qwen2", hidden_size=96, head_dim=16, intermediate_size=160)

    def values(**settings: Any) -> list[float]:
        runner = load("native", model, monkeypatch, **settings)
        return [entry.value for run in everything(runner) for entry in run.logprobs.values()]

    plain, quantised = values(), values(quantization="q8_0")
    assert abs(np.mean(quantised) / np.mean(plain) - 1) < 0.005
    files = {file: file.stat().st_mtime_ns for file in (cache / "packed").glob("*.bin")}
    assert len(files) == 2
    assert values(quantization="q8_0") == quantised
    assert {file: file.stat().st_mtime_ns for file in files} == files
    assert "q8_0 weights" in load("native", model, monkeypatch, quantization="q8_0").hello("w").device


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quantization": "q2"}, "--quantization must be one of none, q8_0, fp8, is 'q2'"),
        ({"quantization": "q8_0", "dtype": "float32"}, "--quantization q8_0 needs --dtype auto, which is float32"),
        ({"quantization": "q8_0"}, r"needs rows of a multiple of 32 values: model\.layers\.0\..*_proj\.weight has 80"),
    ],
)
def test_refused_quantization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load("native", checkpoint(tmp_path / "model", "llama"), monkeypatch, **settings)


def test_only_the_native_engine_quantises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint(tmp_path / "model", "llama")
    with pytest.raises(ConfigError, match="--quantization q8_0 needs the native engine"):
        load("torch", model, monkeypatch, quantization="q8_0")
    with pytest.raises(ConfigError, match="--kv-dtype float16 needs the native engine"):
        load("torch", model, monkeypatch, kv_dtype="float16")
    with pytest.raises(ConfigError, match="--quantization is for a Hugging Face folder"):
        load("auto", stored(tmp_path, "Q4_0"), monkeypatch, quantization="q8_0")


@pytest.mark.parametrize("kv", ["float32", "float16", "bfloat16"])
def test_kv_in_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: str) -> None:
    model = stored(tmp_path, "Q8_0")
    runner = load("native", model, monkeypatch, kv_dtype=kv, kv_cache_memory=64 * 16 * 512)
    assert runner.batch.num_blocks == {"float32": 64, "float16": 128, "bfloat16": 128}[kv]
    same(runner, load("native", model, monkeypatch, kv_dtype=kv, threads=3), everything(runner))
    with pytest.raises(ConfigError, match="--kv-dtype fp8 needs --device cuda: on a CPU choose float16"):
        load("native", model, monkeypatch, kv_dtype="fp8")
    with pytest.raises(ConfigError, match=r"--kv-dtype must be one of auto, .*, is 'float8'"):
        load("native", model, monkeypatch, kv_dtype="float8")


def test_kv_of_16_bits_keeps_the_likelihood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint(tmp_path / "model", "qwen3")

    def mean(kv: str) -> float:
        runs = everything(load("native", model, monkeypatch, kv_dtype=kv))
        return float(np.mean([entry.value for run in runs for entry in run.logprobs.values()]))

    assert abs(mean("float16") / mean("float32") - 1) < 0.0005
    assert abs(mean("bfloat16") / mean("float32") - 1) < 0.005


def test_auto_kv_follows_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, quantised = checkpoint(tmp_path / "model", "llama"), stored(tmp_path, "Q4_0")
    kinds = [
        load("native", model, monkeypatch, dtype=dtype).executor.kv_dtype
        for model, dtype in ((plain, "auto"), (quantised, "auto"), (quantised, "float32"))
    ]
    assert kinds == ["float32", "float16", "float32"]


def test_levels_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = stored(tmp_path, "Q4_1"), []
    for name in build.levels():
        monkeypatch.setenv(build.VARIABLE, name)
        runner = load("native", model, monkeypatch)
        assert f"native {name}," in runner.hello("w").device
        found.append([(run.tokens, run.logprobs) for run in everything(runner)])
    assert all(found[0] == other for other in found)


@pytest.mark.parametrize(
    ("levels", "path", "why"),
    [
        ({"neon": ("asimd-of-aarch64",)}, None, "this CPU has no asimd-of-aarch64"),
        (None, "", r"no C\+\+ compiler was found"),
    ],
)
def test_torch_serves_where_the_native_engine_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, levels: dict[str, Any] | None, path: str | None, why: str
) -> None:
    monkeypatch.setenv("SIGNALBOX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    if levels is not None:
        monkeypatch.setattr(build, "LEVELS", levels)
    if path is not None:
        monkeypatch.setenv("PATH", path)
        monkeypatch.delenv("CXX", raising=False)
    model = checkpoint(tmp_path / "model", "llama")
    with capture_logs() as logs:
        runner = load("auto", model, monkeypatch)
    assert runner.hello("w").device.startswith("cpu (torch ")
    (warning,) = [line for line in logs if line["event"] == "the slow path through torch is in use"]
    assert re.search(why, warning["why"])
    assert re.search(f"torch, the slow path: {why}", store.info(model)["cpu_engine"])


def test_engines_have_different_fingerprints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stored(tmp_path, "Q4_1")
    runners = [
        load("native", model, monkeypatch),
        load("native", model, monkeypatch, dtype="float32"),
        load("native", model, monkeypatch, kv_dtype="float32"),
        load("torch", model, monkeypatch),
    ]
    assert len({runner.hello("w").fingerprint for runner in runners}) == 4


def test_a_worker_starts_without_torch(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", "llama")
    code = (
        "import sys\nfrom pathlib import Path\nfrom worker.config import WorkerConfig\n"
        "from worker.load import load_runner\n"
        f"load_runner(WorkerConfig(model=Path({str(model)!r}), threads=1, kv_cache_memory=2**20))\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
