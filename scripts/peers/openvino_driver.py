"""OpenVINO GenAI's continuous batching behind JSON lines (services/bench/peers/side.py).

Arguments: a GGUF file, the number of threads, GiB for the KV cache. Runs in the environment `openvino` of
$SIGNALBOX_PEERS.
"""

import json
import os
import queue
import sys
import threading

import numpy
import openvino
import openvino_genai as genai

out = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what a library prints goes to the log


def say(**message):
    """One line to the load generator."""
    out.write(json.dumps(message) + "\n")


def open_pipeline(path, threads, gib):
    """The pipeline with prefix caching and chunked prompts."""
    config = genai.SchedulerConfig()
    config.cache_size = gib
    config.enable_prefix_caching = True
    config.dynamic_split_fuse = True
    config.max_num_batched_tokens = 512
    config.max_num_seqs = 64
    return genai.ContinuousBatchingPipeline(path, config, "CPU", {"INFERENCE_NUM_THREADS": threads})


def config_of(call):
    """Greedy for one choice, else at temperature 1; end-of-text is ignored."""
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = call["output"]
    config.ignore_eos = True
    config.do_sample = call["n"] > 1
    config.num_return_sequences = call["n"]
    return config


class Running:
    """A call in the pipeline."""

    def __init__(self, pipeline, call):
        self.call = call
        prompt = openvino.Tensor(numpy.array([call["prompt"]], dtype=numpy.int64))
        self.handle = pipeline.add_request(call["id"], prompt, config_of(call))
        self.choices = {}
        self.tokens = 0

    def pieces(self):
        """(id, choice) for each choice that has new tokens."""
        found = []
        while self.handle.can_read():
            for sequence, output in self.handle.read().items():
                if output.generated_ids:
                    choice = self.choices.setdefault(sequence, len(self.choices))
                    self.tokens += len(output.generated_ids)
                    found.append((self.call["id"], choice))
        return found

    @property
    def ended(self):
        """Whether nothing more will come."""
        return self.tokens >= self.call["n"] * self.call["output"] or (
            self.handle.get_status() != genai.GenerationStatus.RUNNING and not self.handle.can_read()
        )


def serve(pipeline, lines):
    """Step while there is something to do, else wait for the next line; ends with the input."""
    running = []
    while True:
        while not running or not lines.empty():
            calls = lines.get()
            if calls is None:
                return
            running += [Running(pipeline, call) for call in calls]
        pipeline.step()
        pieces = [piece for one in running for piece in one.pieces()]
        if pieces:
            say(pieces=pieces)
        ends = [one for one in running if one.ended]
        if ends:
            say(ends=[(one.call["id"], len(one.call["prompt"]), one.tokens) for one in ends])
            running = [one for one in running if one not in ends]


def main():
    """Serve until the input ends."""
    pipeline = open_pipeline(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    lines = queue.Queue()

    def read():
        for line in sys.stdin:
            lines.put(json.loads(line))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    say(ready=True)
    serve(pipeline, lines)


try:
    main()
except Exception as error:
    say(error=f"{type(error).__name__}: {error}")
    raise
