import http.server, json, sys


class Judge(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        replies = [{"request": r["request"], "score": -float(len(r["response"]))} for r in body["requests"]]
        answer = json.dumps({"replies": replies}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Judge)
print(server.server_address[1], flush=True)
server.serve_forever()
