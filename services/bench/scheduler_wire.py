"""What the wire adds to a step: bytes, the codec's time at both ends, and the way through real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import zmq

from proto.codec import SCHEDULER_TO_FRONTEND, SCHEDULER_TO_WORKER, WORKER_TO_SCHEDULER, decode, encode
from proto.messages import Header, Message
from services.bench.scheduler_engine import Engine
from services.run_dir import RunDir
from services.transport import Dealer, Router, new_identity, plan_link

CONNECT_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class FrameCost:
    """One kind of frame of a decode step: bytes for each row, microseconds to write and to read it."""

    frame: str
    rows: int
    bytes_per_row: float
    encode_us: float
    decode_us: float


@dataclass(frozen=True, kw_only=True)
class RoundTrip:
    """A plan and its result through ipc sockets: microseconds, without and with the codec at both ends."""

    rows: int
    bytes_us: float
    messages_us: float


def measure_frames(rows: int, repeat: int) -> list[FrameCost]:
    """The plan, the result and the frame of a decode step."""
    engine = Engine(rows)
    engine.step()
    plan = engine.plan()
    frame = engine.actions.frames[0]
    return [
        _frame_cost(plan.header, plan.message, SCHEDULER_TO_WORKER, rows, repeat),
        _frame_cost(plan.header, engine.rows.answer(plan.message), WORKER_TO_SCHEDULER, rows, repeat),
        _frame_cost(frame.header, frame.message, SCHEDULER_TO_FRONTEND, rows, repeat),
    ]


def _frame_cost(
    header: Header, message: Message, direction: tuple[type[Message], ...], rows: int, repeat: int
) -> FrameCost:
    data = encode(header, message)
    return FrameCost(
        frame=type(message).__name__,
        rows=rows,
        bytes_per_row=len(data) / rows,
        encode_us=_median([_microseconds(lambda: encode(header, message)) for _ in range(repeat)]),
        decode_us=_median([_microseconds(lambda: decode(data, direction)) for _ in range(repeat)]),
    )


def measure_round_trip(rows: int, repeat: int) -> RoundTrip:
    """Medians of `repeat` round trips, both kinds in turn. One thread holds both ends, so that none waits for it."""
    engine = Engine(rows)
    header, plan = engine.plan().header, engine.plan().message
    result = engine.rows.answer(plan)
    plan_bytes, result_bytes = encode(header, plan), encode(header, result)
    with TemporaryDirectory(prefix="signalbox-") as folder, zmq.Context() as context:
        link = plan_link(RunDir(Path(folder)))
        router, dealer = Router(context, link), Dealer(context, link, identity := new_identity())

        def carry_bytes() -> None:
            router.send(identity, plan_bytes)
            _receive(dealer.socket)
            dealer.send(result_bytes)
            _receive(router.socket)

        def carry_messages() -> None:
            router.send(identity, encode(header, plan))
            decode(_receive(dealer.socket), SCHEDULER_TO_WORKER)
            dealer.send(encode(header, result))
            decode(_receive(router.socket), WORKER_TO_SCHEDULER)

        dealer.monitor.poll(1000 * CONNECT_SECONDS)
        dealer.send(b"hello")
        _receive(router.socket)
        times = [(_microseconds(carry_bytes), _microseconds(carry_messages)) for _ in range(repeat)]
        dealer.close()
        router.close()
    plain, coded = zip(*times, strict=True)
    return RoundTrip(rows=rows, bytes_us=_median(plain), messages_us=_median(coded))


def _receive(socket: zmq.Socket[bytes]) -> bytes:
    """The last part of the next message."""
    if not socket.poll(1000 * CONNECT_SECONDS):
        raise RuntimeError(f"nothing arrived within {CONNECT_SECONDS} s")
    return socket.recv_multipart()[-1]


def _microseconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - began)


def _median(times: Iterable[float]) -> float:
    return float(np.median(list(times)))
