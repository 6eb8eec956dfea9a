"""Static batching, the policy before continuous batching: a batch is filled, and waits for its slowest row.

At its best: KV memory is a rectangle, as many rows as fit, each of the batch's longest prompt and the limit of answers;
a row that is done costs no time any more, its answer goes out at once, and only real tokens are computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from services.bench.latency import LatencyMeter
from services.bench.simulated_worker import WorkerModel
from services.bench.usage import Moment
from services.bench.workload import Request


def simulate(model: WorkerModel, requests: list[Request], meter: LatencyMeter) -> Iterator[Moment]:
    """Serve the requests in order of arrival, batch by batch."""
    arrivals = np.array([request.arrival for request in requests])
    now, done = 0.0, 0
    while done < len(requests):
        if arrivals[done] > now:
            yield _moment(float(arrivals[done]), float(arrivals[done]) - now)
            now = float(arrivals[done])
        batch = _fill(model, requests[done : int(np.searchsorted(arrivals, now, "right"))])
        indices = np.arange(done, done + len(batch))
        done += len(batch)
        prompts = np.array([request.num_prompt for request in batch])
        outputs = np.array([request.num_output for request in batch])
        for step in range(int(outputs.max())):
            live = outputs > step
            running = int(live.sum())
            positions = int(prompts[live].sum()) + step * running
            seconds = model.seconds(running if step else int(prompts.sum()), positions)
            now += seconds
            yield _moment(
                now,
                seconds,
                allocated=len(batch) * _row(batch),
                used=int((prompts + np.minimum(outputs - 1, step)).sum()),
                running=running,
                waiting=int(np.searchsorted(arrivals, now, "right")) - done,
            )
            meter.note(now, indices[live], np.ones(running, np.int64))


def _moment(
    now: float, seconds: float, *, allocated: int = 0, used: int = 0, running: int = 0, waiting: int = 0
) -> Moment:
    return Moment(
        now=now, seconds=seconds, allocated=allocated, used=used, settled=used, running=running, waiting=waiting
    )


def _fill(model: WorkerModel, waiting: list[Request]) -> list[Request]:
    """The first of them, as many as make a rectangle that fits."""
    batch = waiting[:1]
    for request in waiting[1 : model.max_rows]:
        if (len(batch) + 1) * _row([*batch, request]) > model.num_slots:
            break
        batch.append(request)
    return batch


def _row(batch: list[Request]) -> int:
    """Slots of each row: the longest prompt and the longest answer allowed."""
    return max(request.num_prompt for request in batch) + max(request.max_tokens for request in batch)
