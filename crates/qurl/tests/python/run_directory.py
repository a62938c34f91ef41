"""Reads a run directory with TensorBoard's and transformers' own readers and prints what they found as JSON.

Usage: run_directory.py TENSORBOARD_DIR CHECKPOINT_DIR
"""

import json
import sys

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

events = EventAccumulator(sys.argv[1])
events.Reload()
scalars = {tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
ids = tokenizer("1+2=", return_tensors="pt").input_ids
with torch.no_grad():
    logprobs = torch.log_softmax(model(ids).logits[0].double(), -1)
scored = [logprobs[i, ids[0, i + 1]].item() for i in range(ids.shape[1] - 1)]
print(json.dumps({"scalars": scalars, "ids": ids[0].tolist(), "logprobs": scored}))
