"""Callers of a server, good and bad, without end: benches/soak.sh starts them.

    soak_callers.py URL MODEL COUNT

Eight threads ask for completions of changing lengths, stream some and leave in the middle of others, send
what is no request, read metrics and update weights. COUNT is a file that always holds the number of answers so
far; Ctrl-C prints how many answers there were of each kind. An answer that should have been and was not is
counted as "lost".
"""

import collections
import http.client
import json
import os
import random
import signal
import socket
import sys
import threading
import time

THREADS = 8
PAUSE = 0.05  # seconds between the requests of a thread, on average
counts, lock, over = collections.Counter(), threading.Lock(), threading.Event()


def call(address, method, path, body=None, leave_after=None):
    """Status of an answer that is read to its end, or left after some bytes."""
    connection = http.client.HTTPConnection(address, timeout=120)
    try:
        headers = {"content-type": "application/json"} if body else {}
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        answer.read(leave_after) if leave_after else answer.read()
        return answer.status
    finally:
        connection.close()


def completion(numbers):
    body = {
        "model": "tiny",
        "prompt": f"{numbers.randrange(100)}+{numbers.randrange(100)}=",
        "max_tokens": numbers.randrange(1, 48),
        "n": numbers.choice([1, 1, 1, 4]),
        "temperature": numbers.choice([0.0, 0.7, 1.0]),
        "ignore_eos": numbers.random() < 0.5,
    }
    if numbers.random() < 0.3:
        body["logprobs"] = 3
    return body


def garbage(address, numbers):
    """Bytes that are no request; whatever comes back is an answer, also nothing."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=120) as stream:
        post = "POST /generate HTTP/1.1\r\nContent-Length: 9999\r\n\r\n"
        start = numbers.choice(["", "GET / HTTP/1.1\r\n", post])
        stream.sendall(start.encode() + numbers.randbytes(numbers.randrange(2000)))
        stream.shutdown(socket.SHUT_WR)
        try:
            while stream.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass


def one(address, model, numbers):
    """One request: its kind and how it was answered."""
    kind, path = numbers.random(), "/v1/completions"
    if kind < 0.55:
        return "completion", call(address, "POST", path, json.dumps(completion(numbers)))
    if kind < 0.70:
        return "stream", call(address, "POST", path, json.dumps(completion(numbers) | {"stream": True}))
    if kind < 0.80:
        body = json.dumps(completion(numbers) | {"stream": True, "max_tokens": 48, "ignore_eos": True})
        return "left in the middle", call(address, "POST", path, body, numbers.randrange(1, 400))
    if kind < 0.86:
        return "bad JSON", call(address, "POST", path, "{" * numbers.randrange(1, 4000))
    if kind < 0.92:
        garbage(address, numbers)
        return "garbage", "closed"
    if kind < 0.995:
        return "metrics", call(address, "GET", "/metrics")
    return "new weights", call(address, "POST", "/update_weights", json.dumps({"weight_dir": model}))


def caller(seed, address, model, place):
    numbers = random.Random(seed)
    while not over.is_set():
        try:
            key = one(address, model, numbers)
        except Exception as error:  # the server has gone, or did not answer
            if over.is_set():
                return
            key = ("lost", type(error).__name__)
        with lock:
            counts[key] += 1
            with open(place + ".new", "w") as file:
                file.write(str(sum(counts.values())))
            os.replace(place + ".new", place)
        time.sleep(numbers.random() * 2 * PAUSE)


def main():
    url, model, place = sys.argv[1:]
    address = url.removeprefix("http://")
    signal.signal(signal.SIGINT, lambda *_: over.set())
    threads = [threading.Thread(target=caller, args=(seed, address, model, place)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (kind, answer), count in sorted(counts.items(), key=str):
        print(f"{count:>9} {kind}: {answer}")


main()
