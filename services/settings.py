"""What each service can be told, as one frozen record per service.

Every field is an option of its command (`max_num_seqs` is `--max-num-seqs`) and a variable of the environment
(`SIGNALBOX_MAX_NUM_SEQS`); services/options.py makes both from these records. The text in a field's type is
its help.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, get_args, get_type_hints


class SettingsError(ValueError):
    """A setting that cannot be used; the message is one line that names the option and what to do."""


class Device(StrEnum):
    """Where a worker computes. auto: the CPU, until the GPU engine has run on a GPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DType(StrEnum):
    """The number format that a worker computes in. auto, on a CPU: weights as stored."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class KVDType(StrEnum):
    """The number format of a worker's KV blocks. auto, on a CPU: float16, or float32 where the weights are that. fp8
    (E4M3) is for GPUs."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"


class Quantization(StrEnum):
    """How the matrices of a Hugging Face folder are kept in memory."""

    NONE = "none"
    Q8_0 = "q8_0"
    FP8 = "fp8"


class ToolCallParser(StrEnum):
    """How the model writes tool calls. auto: as its chat template says."""

    AUTO = "auto"
    HERMES = "hermes"
    LLAMA = "llama"


class ReasoningParser(StrEnum):
    """none: thoughts are content like all else. think: what stands between <think> and </think> is split off."""

    NONE = "none"
    THINK = "think"


class LogFormat(StrEnum):
    """auto: console on a terminal, json otherwise."""

    AUTO = "auto"
    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """The least severe messages that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Address:
    """HOST:PORT. Port 0 takes a free one; the service publishes which (services/status.py)."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """From `HOST:PORT` or `[IPV6]:PORT`; SettingsError when it is neither."""
        found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]\s/]+)):(\d{1,5})", text)
        if found is None or int(found[3]) > 65535:
            raise SettingsError(f"{text!r} is not an address; write HOST:PORT, for example 127.0.0.1:8000")
        return cls(found[1] or found[2], int(found[3]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class ByteSize(int):
    """A number of bytes that prints as people write it: 512MiB."""

    @classmethod
    def parse(cls, text: str) -> ByteSize:
        """From `512MiB`, `2GiB`, `1.5GB` or plain bytes; SettingsError otherwise."""
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
        if found is None or found[2].upper() not in UNITS:
            raise SettingsError(f"{text!r} is not a size; write 512MiB, 2GiB or a number of bytes")
        return cls(float(found[1]) * UNITS[found[2].upper()])

    def __str__(self) -> str:
        for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if self and self % factor == 0:
                return f"{self // factor}{unit}"
        return int.__str__(self)


def runtime_base() -> Path:
    """Where run folders live: $XDG_RUNTIME_DIR when it is there, else the folder for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path(tempfile.gettempdir())


def default_run_dir() -> Path:
    """The run folder of services that are started by hand: one for each user."""
    return runtime_base() / f"signalbox-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the most that a number may be; both are allowed."""

    least: float
    most: float = math.inf

    def __str__(self) -> str:
        return f"at least {self.least}" if self.most == math.inf else f"from {self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Metavar:
    """What stands for the value in the help, where the type does not say it."""

    text: str


def flag_of(name: str) -> str:
    """The option of a field: `max_num_seqs` is `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def words_of(name: str, value: object) -> list[str]:
    """A field's option with its value, as on a command line; nothing for None."""
    if isinstance(value, bool):
        return [flag_of(name if value else f"no_{name}")]
    return [] if value is None else [flag_of(name), str(value)]


def variable_of(name: str) -> str:
    """The environment variable of a field: `max_num_seqs` is `SIGNALBOX_MAX_NUM_SEQS`."""
    return "SIGNALBOX_" + name.upper()


def host_name() -> str:
    """The name of this machine or container."""
    return os.uname().nodename


DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_HTTP = Address("127.0.0.1", 8000)
DEFAULT_GRPC = Address("127.0.0.1", 8001)
DEFAULT_MAX_BODY = ByteSize(8 * 2**20)
DEFAULT_EVENT_MEMORY = ByteSize(32 * 2**20)
MAX_LINK_PORT = 65533
POSITIVE = Bounds(1)
SHARE = Metavar("SHARE")
NOT_NEGATIVE = Bounds(0)


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """What every command that serves can be told."""

    grace_seconds: Annotated[
        float, "Seconds that running requests may take to finish after SIGTERM or Ctrl-C.", NOT_NEGATIVE
    ] = 30.0
    log_format: Annotated[LogFormat, "auto: console on a terminal, json otherwise."] = LogFormat.AUTO
    log_level: Annotated[LogLevel, "The least severe messages that are logged."] = LogLevel.INFO

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            for bounds in get_args(hint):
                if isinstance(bounds, Bounds) and value is not None and not bounds.least <= value <= bounds.most:
                    raise SettingsError(f"{flag_of(name)} must be {bounds}, not {value}")


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(CommonSettings):
    """What every single service can be told."""

    run_dir: Annotated[Path, "Folder of the ipc sockets and status files that all services share."] = field(
        default_factory=default_run_dir
    )
    name: Annotated[str, "Tells this process from others of its kind in the run folder."] = field(
        default_factory=host_name
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.name) is None:
            raise SettingsError(f"--name must be 1 to 64 letters, digits, '.', '_' or '-', not {self.name!r}")


@dataclass(frozen=True, kw_only=True)
class LinkSettings(ServiceSettings):
    """How a service reaches the others of its engine when they are on other machines (docs/security.md)."""

    link: Annotated[
        Address | None, "Where the scheduler listens for services on other machines; it takes the next two ports too."
    ] = None
    link_key: Annotated[
        Path | None, "This service's secret key, from `signalbox keys`; --link needs it.", Metavar("FILE")
    ] = None
    link_peers: Annotated[
        Path | None,
        "Scheduler: folder of the public keys to let in. Others: the scheduler's public key.",
        Metavar("PATH"),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [value is not None for value in (self.link, self.link_key, self.link_peers)]
        if any(given) and not all(given):
            raise SettingsError("--link, --link-key and --link-peers go together: TCP without keys is not offered")
        if self.link is not None and not 0 < self.link.port <= MAX_LINK_PORT:
            raise SettingsError(f"--link takes three ports in a row: give one from 1 to {MAX_LINK_PORT}")


@dataclass(frozen=True, kw_only=True)
class BatchSettings(CommonSettings):
    """The limits of one step, told to the scheduler and to each worker; the smaller one rules."""

    max_num_seqs: Annotated[int, "The most sequences in one step of a worker.", Bounds(1, 65536)] = 64
    max_num_batched_tokens: Annotated[
        int, "The most tokens in one step of a worker; longer prompts go in chunks.", Bounds(1, 2**20)
    ] = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingsError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs"
                f" ({self.max_num_seqs}), so that every running sequence can take a step"
            )


@dataclass(frozen=True, kw_only=True)
class RecoverySettings(CommonSettings):
    """How long an outage may last before clients are told."""

    recovery_timeout: Annotated[
        float, "Seconds that requests wait for a usable engine before they end as unavailable.", NOT_NEGATIVE
    ] = 30.0


@dataclass(frozen=True, kw_only=True)
class DetectionSettings(CommonSettings):
    """When a worker that neither ended nor answers counts as lost."""

    worker_timeout: Annotated[
        float, "Seconds of silence after which a worker counts as lost; one that died is noticed at once.", Bounds(1)
    ] = 1.5
    step_timeout: Annotated[float, "Seconds after which a step of a worker counts as hung.", Bounds(1)] = 120.0


@dataclass(frozen=True, kw_only=True)
class QueueSettings(RecoverySettings):
    """How much may wait, and for how long."""

    max_queued_requests: Annotated[
        int, "The most requests that may wait; beyond it: overloaded, retry after.", POSITIVE
    ] = 1024
    max_queued_tokens: Annotated[
        int, "The most prompt tokens that may wait; beyond it: overloaded, retry after.", POSITIVE
    ] = 1_048_576


@dataclass(frozen=True, kw_only=True)
class PolicySettings(CommonSettings):
    """How the scheduler batches."""

    max_chunk: Annotated[int, "The most tokens of one prompt in one step.", Bounds(1, 2**20)] = 512
    itl_target_ms: Annotated[
        float,
        "Milliseconds between two tokens that prompts should not make running answers wait for; 0: no target.",
        NOT_NEGATIVE,
        Metavar("MS"),
    ] = 0.0
    prefix_caching: Annotated[bool, "Keep the KV of ended requests for others that begin alike."] = True


@dataclass(frozen=True, kw_only=True)
class EventSettings(CommonSettings):
    """What becomes of the scheduler's event log (docs/observability.md)."""

    record: Annotated[
        Path | None, "File for every input of the scheduler, for `signalbox replay`.", Metavar("FILE")
    ] = None
    event_memory: Annotated[
        ByteSize, "The last inputs of the scheduler that are kept in memory; 0: none.", NOT_NEGATIVE
    ] = DEFAULT_EVENT_MEMORY
    fault_dir: Annotated[
        Path | None, "Folder for the inputs in memory when the scheduler meets a fault; none: the run folder."
    ] = None


@dataclass(frozen=True, kw_only=True)
class ModelSettings(CommonSettings):
    """Which model is served."""

    model: Annotated[str, "A name in the model store, or the path of a Hugging Face folder or GGUF file."] = (
        DEFAULT_MODEL
    )


@dataclass(frozen=True, kw_only=True)
class EngineSettings(ModelSettings, BatchSettings):
    """How a worker computes."""

    device: Annotated[Device, "Where the worker computes."] = Device.AUTO
    dtype: Annotated[DType, "The number format it computes in; auto: weights as stored, bfloat16 on a GPU."] = (
        DType.AUTO
    )
    kv_dtype: Annotated[
        KVDType, "The number format of keys and values; auto, on a CPU: float16, or as float32 weights."
    ] = KVDType.AUTO
    quantization: Annotated[
        Quantization, "How a Hugging Face folder's matrices are kept: q8_0 on a CPU, fp8 (E4M3) on a GPU."
    ] = Quantization.NONE
    block_size: Annotated[int, "Token slots in one KV block, a power of two.", Bounds(1, 1024)] = 16
    kv_cache_memory: Annotated[
        ByteSize | None,
        "Memory for one worker's KV blocks: 512MiB, 2GiB or bytes; none: 512MiB, or what the GPU options leave.",
        POSITIVE,
    ] = None
    gpu_memory_utilization: Annotated[float, "The engine's part of a GPU's memory.", Bounds(0.01, 1), SHARE] = 0.9
    gpu_memory_fraction: Annotated[
        float | None, "The same for a GPU that is shared with a trainer, instead of it.", Bounds(0.01, 1), SHARE
    ] = None
    enforce_eager: Annotated[bool, "On a GPU: launch each kernel instead of captured graphs."] = False
    batch_invariant: Annotated[bool, "On a GPU: results depend on a row's own tokens alone, which costs speed."] = False
    window: Annotated[int, "Plans in flight to a worker; 0: 2, or 1 with speculation.", Bounds(0, 4)] = 0
    threads: Annotated[int, "Most threads of one worker's computation; 0: one for each usable core.", NOT_NEGATIVE] = 0
    tensor_parallel_size: Annotated[
        int,
        "Ranks that share one worker's model, each a process with its part; memory and threads are each one's.",
        Bounds(1, 64),
    ] = 1
    tensor_parallel_across_hosts: Annotated[bool, "Allow ranks on different hosts, which is slow."] = False
    speculative_tokens: Annotated[
        int,
        "Tokens to guess ahead in each step, from what followed the same words before; changes no answer; 0: none.",
        Bounds(0, 32),
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size & (self.block_size - 1):
            raise SettingsError(f"--block-size must be a power of two, not {self.block_size}")


@dataclass(frozen=True, kw_only=True)
class FrontSettings(ModelSettings):
    """Where and as what the engine is offered."""

    http: Annotated[Address, "Where the OpenAI HTTP API listens, HOST:PORT."] = DEFAULT_HTTP
    grpc: Annotated[Address, "Where the gRPC API listens, HOST:PORT."] = DEFAULT_GRPC
    served_model_name: Annotated[str, "The model's name in the APIs; empty: the last part of --model."] = ""
    tenant_header: Annotated[
        str, "Header (in gRPC: metadata) that names the tenant, set by a gateway that clients cannot pass; empty: none."
    ] = ""
    api_key_file: Annotated[
        Path | None,
        "File of the keys, one a line, of which clients must send one; SIGNALBOX_API_KEY may hold one more.",
        Metavar("FILE"),
    ] = None
    grpc_tls_cert: Annotated[Path | None, "Certificate chain of the gRPC port, PEM; none: no TLS.", Metavar("FILE")] = (
        None
    )
    grpc_tls_key: Annotated[Path | None, "Its secret key, PEM.", Metavar("FILE")] = None
    grpc_client_ca: Annotated[
        Path | None, "Authority whose certificates gRPC clients must have, PEM; none: any client.", Metavar("FILE")
    ] = None
    access_log: Annotated[bool, "Log every request as info; else as debug."] = False
    tool_call_parser: Annotated[ToolCallParser, "How the model writes tool calls; auto: as its chat template says."] = (
        ToolCallParser.AUTO
    )
    reasoning_parser: Annotated[
        ReasoningParser, "think: what a chat answer holds in <think> tags becomes its reasoning_content."
    ] = ReasoningParser.NONE
    tokenizer_info: Annotated[
        bool, "Serve GET /tokenizer_info: the tokenizer's settings and the chat template, for clients that use them."
    ] = False
    max_body: Annotated[ByteSize, "The largest request body that is read.", Bounds(1024)] = DEFAULT_MAX_BODY

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tenant_header and re.fullmatch(r"[A-Za-z][A-Za-z0-9-]{0,63}", self.tenant_header) is None:
            raise SettingsError(f"--tenant-header must be the name of a header, not {self.tenant_header!r}")
        if (self.grpc_tls_cert is None) != (self.grpc_tls_key is None):
            raise SettingsError("--grpc-tls-cert and --grpc-tls-key go together")
        if self.grpc_client_ca is not None and self.grpc_tls_cert is None:
            raise SettingsError("--grpc-client-ca needs --grpc-tls-cert and --grpc-tls-key")

    @property
    def api_name(self) -> str:
        """The model's name in the APIs."""
        return self.served_model_name or Path(self.model).name.removesuffix(".gguf")


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings(LinkSettings, BatchSettings, QueueSettings, DetectionSettings, PolicySettings, EventSettings):
    """What signalbox-scheduler can be told."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(LinkSettings, EngineSettings):
    """What signalbox-worker can be told."""

    tensor_parallel_rank: Annotated[
        int,
        "Which rank this process is; rank 0 is the worker, and starts the others where no address is given.",
        NOT_NEGATIVE,
    ] = 0
    tensor_parallel_address: Annotated[
        str,
        "Where rank 0 waits for ranks that are started by hand, HOST:PORT; empty: it starts them.",
        Metavar("HOST:PORT"),
    ] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        rank, size = self.tensor_parallel_rank, self.tensor_parallel_size
        if rank >= size:
            raise SettingsError(f"--tensor-parallel-rank {rank} must be below --tensor-parallel-size, which is {size}")
        if rank and not self.tensor_parallel_address:
            raise SettingsError(f"--tensor-parallel-rank {rank} needs the --tensor-parallel-address of rank 0")


@dataclass(frozen=True, kw_only=True)
class FrontendSettings(LinkSettings, FrontSettings, RecoverySettings):
    """What signalbox-frontend can be told."""

    share_ports: Annotated[
        bool, "Listen on ports that other frontends of this engine listen on too; the system spreads connections."
    ] = False


@dataclass(frozen=True, kw_only=True)
class UpSettings(FrontSettings, EngineSettings, QueueSettings, DetectionSettings, PolicySettings, EventSettings):
    """What `signalbox up` can be told: all of it, for one scheduler, some workers and some frontends."""

    workers: Annotated[int, "Worker processes.", Bounds(1, 256)] = 1
    frontends: Annotated[int, "Frontend processes, which share the ports.", Bounds(1, 64)] = 1
    run_dir: Annotated[
        Path | None, "Folder of the ipc sockets and status files; none: a private one, removed at the end."
    ] = None
