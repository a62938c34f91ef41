"""Callers who mean no good, one kind after the other, against a running `qurl serve` on a loopback address.

    attacks.py URL PID KEY

PID is the server's, whose resident memory is read ten times a second. After each kind a completion has to be
answered. Prints a line for each: what was done, the answers by status ("cut" where the server hung up without
one), megabytes before, at most and after, and how long the completion took. Only the standard library.
"""

import collections
import http.client
import json
import os
import random
import resource
import socket
import sys
import threading
import time

url, pid, key = sys.argv[1], int(sys.argv[2]), sys.argv[3]
HOST, PORT = url.removeprefix("http://").split(":")
HEAD = f"Host: {HOST}:{PORT}\r\nAuthorization: Bearer {key}\r\n"
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)


def memory():
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


def connect():
    return socket.create_connection((HOST, int(PORT)), timeout=120)


def answer(data, read=True, pause=None):
    """Sends bytes, slowly if asked to; the status of the answer."""
    try:
        with connect() as stream:
            try:
                if pause is None:
                    stream.sendall(data)
                else:
                    for byte in data:
                        stream.sendall(bytes([byte]))
                        time.sleep(pause)
            except OSError:
                pass  # refused before all was sent: the answer may be there
            head = stream.recv(64) if read else b""
            return head.split(b" ")[1].decode() if head.startswith(b"HTTP/1.1 ") else "cut"
    except OSError:
        return "cut"


def post(path, body, extra=""):
    body = body.encode() if isinstance(body, str) else body
    head = f"POST {path} HTTP/1.1\r\n{HEAD}{extra}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return answer(head.encode() + body)


def together(count, one):
    """The answers of so many threads."""
    answers, lock = collections.Counter(), threading.Lock()

    def run(i):
        status = one(i)
        with lock:
            answers[status] += 1

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(answers)


def held(count, data):
    """So many connections that send this and then nothing, for 35 seconds, with completions meanwhile."""
    streams = []
    for _ in range(count):
        stream = connect()
        if data:
            stream.sendall(data)
        streams.append(stream)
    served = [round(completion(), 3)]
    time.sleep(35)
    served.append(round(completion(), 3))
    left = 0
    for stream in streams:
        stream.setblocking(False)
        try:
            while stream.recv(4096):
                pass
        except BlockingIOError:
            left += 1
        except OSError:
            pass
        stream.close()
    return {"connections": count, "still open after 35 s": left, "completions meanwhile, s": served}


def completion():
    began = time.monotonic()
    connection = http.client.HTTPConnection(HOST, int(PORT), timeout=300)
    body = json.dumps({"prompt": "1+1=", "max_tokens": 4})
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/completions", body, headers)
    response = connection.getresponse()
    response.read()
    assert response.status == 200, response.status
    return time.monotonic() - began


def slow_readers():
    """Streams of many samples that nobody reads, for 40 seconds."""
    body = json.dumps(
        {"prompt": "1+1=", "n": 12, "max_tokens": 4000, "ignore_eos": True, "stream": True, "logprobs": 20}
    )
    head = f"POST /v1/completions HTTP/1.1\r\n{HEAD}Content-Length: {len(body)}\r\n\r\n"
    streams = []
    for _ in range(100):
        stream = socket.socket()
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stream.connect((HOST, int(PORT)))
        stream.sendall((head + body).encode())
        streams.append(stream)
    time.sleep(40)
    for stream in streams:
        stream.close()
    return {"streams": len(streams)}


HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: loc"
HALF_BODY = f"POST /v1/completions HTTP/1.1\r\n{HEAD}Content-Length: 1000000\r\n\r\n{{".encode()
SLOW_HEAD = b"GET /health HTTP/1.1\r\nX: " + b"a" * 100
SLOW_BODY = HALF_BODY + b" " * 100
ZEROS = '{"prompt": "1+1=", "max_tokens": 2, "unknown": [' + "0," * 1_000_000 + "0]}"
MORE = '{"prompt": "1+1=", "max_tokens": 2, "unknown": [' + "0," * ((8 << 20) // 2 - 40) + "0]}"
LISTS = '{"prompt": [' + "[1]," * 500_000 + "[1]]}"
LONG = json.dumps({"prompt": "12+34=" * ((8 << 20) // 6 - 40)})
DEEP = '{"prompt": ' + "[" * (1 << 21) + "]" * (1 << 21) + "}"
TRICKS = [
    "/../../etc/passwd", "//etc/passwd", "/v1/%2e%2e/%2e%2e/etc/passwd", "/%00", "/v1/models/../../x",
    "/v1/models/%ff%fe", "/" + "a/" * 8000, "http://evil.example/", "*", "/v1/models/" + "%2f.." * 50,
]
WRONG = ["", "Bearer", "Bearer ", "Bearer " + key[:-1], "Bearer " + key + "x", "Basic " + key]
WRONG.append("Bearer " + key * 9)

many = {"prompt": "1", "n": 1 << 60, "stream": True}
numbers = random.Random(5)
ATTACKS = {
    "1,000 idle connections": lambda: held(1000, b""),
    "1,000 halves of a head": lambda: held(1000, HALF_HEAD),
    "1,000 halves of a body": lambda: held(1000, HALF_BODY),
    "200 heads, a byte every half second": lambda: together(200, lambda _: answer(SLOW_HEAD, pause=0.5)),
    "200 bodies, a byte every half second": lambda: together(200, lambda _: answer(SLOW_BODY, pause=0.5)),
    "100 streams of 12 samples that nobody reads": slow_readers,
    "200 headers of 1 MB": lambda: together(
        200, lambda _: answer(f"GET /health HTTP/1.1\r\n{HEAD}X: {'a' * (1 << 20)}\r\n\r\n".encode())
    ),
    "200 times 10,000 headers": lambda: together(
        200, lambda _: answer(f"GET /health HTTP/1.1\r\n{HEAD}".encode() + b"X: y\r\n" * 10000)
    ),
    "64 bodies of a million zeros": lambda: together(64, lambda _: post("/v1/completions", ZEROS)),
    "64 bodies of four million zeros": lambda: together(64, lambda _: post("/v1/completions", MORE)),
    "64 bodies of 500,000 prompts": lambda: together(64, lambda _: post("/v1/completions", LISTS)),
    "16 prompts of 8 MB of text": lambda: together(16, lambda _: post("/v1/completions", LONG)),
    "16 bodies of 4 million brackets": lambda: together(16, lambda _: post("/v1/completions", DEEP)),
    "64 bodies of 100 MB": lambda: together(64, lambda _: post("/v1/completions", b" " * (100 << 20))),
    "200 requests for 2^60 samples": lambda: together(
        200, lambda _: post("/v1/completions", json.dumps(many))
    ),
    "1,000 times random bytes": lambda: together(
        1000, lambda i: answer(random.Random(i).randbytes(1 + i % 3000) + b"\r\n\r\n")
    ),
    "tricks with paths": lambda: together(
        len(TRICKS), lambda i: answer(f"GET {TRICKS[i]} HTTP/1.1\r\n{HEAD}Connection: close\r\n\r\n".encode())
    ),
    "700 wrong keys": lambda: together(
        700,
        lambda i: answer(
            f"GET /v1/models HTTP/1.1\r\nHost: {HOST}:{PORT}\r\nAuthorization: {WRONG[i % 7]}\r\n\r\n".encode()
        ),
    ),
}

print(f"{os.uname().sysname} {os.uname().release}, server of {memory():.0f} MB, {completion():.3f} s")
for name, attack in ATTACKS.items():
    before, most, over = memory(), [0.0], threading.Event()

    def watch():
        most[0] = max(most[0], memory())
        while not over.wait(0.1):
            most[0] = max(most[0], memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    told = attack()
    took, served = time.monotonic() - began, completion()
    over.set()
    watcher.join()
    most[0] = max(most[0], memory())
    memories = f"{before:.0f}, {most[0]:.0f}, {memory():.0f} MB"
    print(f"{name}: {told}; {took:.1f} s; memory {memories}; completion {served:.3f} s", flush=True)
