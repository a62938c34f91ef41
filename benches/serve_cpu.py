"""Processor time of a server's threads for each token: 64 streams at once, beside 64 answers that are sent whole.

    serve_cpu.py QURL MODEL [ROUNDS]
"""
import http.client, json, os, subprocess, sys, threading, time

qurl, model, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 5
tick = os.sysconf("SC_CLK_TCK")
env = dict(os.environ, QURL_THREADS="1")
server = subprocess.Popen(
    [qurl, "serve", "--model", model, "--port", "0", "--json", "--max-num-seqs", "64"],
    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env,
)
url = json.loads(server.stdout.readline())["url"]
host = url.removeprefix("http://")
NEW = 1024


def threads():
    """Nanoseconds on a processor by the name of threads."""
    times = {}
    for task in os.listdir(f"/proc/{server.pid}/task"):
        try:
            name = open(f"/proc/{server.pid}/task/{task}/comm").read().strip()
            ran = int(open(f"/proc/{server.pid}/task/{task}/schedstat").read().split()[0])
        except OSError:
            continue
        times[name] = times.get(name, 0) + ran
    return times


def ask(seed, stream):
    connection = http.client.HTTPConnection(host, timeout=600)
    body = {"prompt": [5, 6, 7], "max_tokens": NEW, "ignore_eos": True, "seed": seed, "stream": stream}
    body["return_token_ids"] = True
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    while response.read1(1 << 16):
        pass


def measure(stream):
    before = threads()
    asked = [threading.Thread(target=ask, args=(seed, stream)) for seed in range(64)]
    [a.start() for a in asked]
    [a.join() for a in asked]
    after = threads()
    return {name: (after[name] - before.get(name, 0)) / (64 * NEW) / 1e3 for name in after}


measure(True)
for _ in range(rounds):
    for stream in (True, False):
        told = {name: round(us, 2) for name, us in measure(stream).items() if name in ("qurl-engine", "qurl-http")}
        print("streamed" if stream else "whole   ", told, "us a token", flush=True)
server.terminate()
