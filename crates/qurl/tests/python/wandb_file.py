"""Reads what Weights & Biases wrote offline, with its own messages, and prints run and history as JSON.

The file is a log in LevelDB's format: after 7 bytes of header, blocks of 32 KiB with pieces of records, each
after its checksum (4 bytes), length (2) and kind (1: whole, 2: first, 3: middle, 4: last).

Usage: wandb_file.py DIRECTORY
"""

import json
import pathlib
import struct
import sys

from wandb.proto import wandb_internal_pb2

BLOCK = 32768


def records(data):
    at, record = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


[path] = pathlib.Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb")
history, config, name = [], {}, None
for record in records(path.read_bytes()):
    kind = record.WhichOneof("record_type")
    if kind == "history":
        history.append({".".join(i.nested_key) or i.key: json.loads(i.value_json)
            for i in record.history.item})
    if kind == "run":
        name = record.run.display_name or name
        config.update({".".join(u.nested_key) or u.key: json.loads(u.value_json)
            for u in record.run.config.update})
print(json.dumps({"name": name, "config": config, "history": history}))
