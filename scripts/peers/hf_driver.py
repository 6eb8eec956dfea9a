"""Hugging Face's generate behind JSON lines (services/bench/peers/side.py): each list of calls is one static batch.

Arguments: the model's folder and the number of threads. Runs in the environment `hf` of $SIGNALBOX_PEERS.
"""

import json
import os
import sys

threads = int(sys.argv[2])
os.environ["OMP_NUM_THREADS"] = str(threads)

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList  # noqa: E402

out = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what a library prints goes to the log


def say(**message):
    """One line to the load generator."""
    out.write(json.dumps(message) + "\n")


class Pieces(StoppingCriteria):
    """Called after each step: tells whose tokens have come, and ends nobody before the batch does."""

    def __init__(self, calls, width):
        self.rows = [(call, choice) for call in calls for choice in range(call["n"])]
        self.width = width
        self.ended = set()

    def __call__(self, input_ids, scores, **more):
        done = input_ids.shape[1] - self.width
        say(pieces=[(call["id"], choice) for call, choice in self.rows if done <= call["output"]])
        ends = [call for call, choice in self.rows if choice == 0 and done == call["output"]]
        if ends:
            say(ends=[(call["id"], len(call["prompt"]), call["n"] * call["output"]) for call in ends])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@torch.inference_mode()
def run(model, calls):
    """Generate for all calls, as long as the longest one needs."""
    width = max(len(call["prompt"]) for call in calls)
    ids = torch.zeros(len(calls), width, dtype=torch.long)
    mask = torch.zeros(len(calls), width, dtype=torch.long)
    for row, call in enumerate(calls):
        ids[row, width - len(call["prompt"]) :] = torch.tensor(call["prompt"])
        mask[row, width - len(call["prompt"]) :] = 1
    choices = calls[0]["n"]
    model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max(call["output"] for call in calls),
        do_sample=choices > 1,
        top_k=0 if choices > 1 else None,
        num_return_sequences=choices,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([Pieces(calls, width)]),
    )


def main():
    """Serve until the input ends."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    say(ready=True)
    for line in sys.stdin:
        run(model, json.loads(line))


try:
    main()
except Exception as error:
    say(error=f"{type(error).__name__}: {error}")
    raise
