"""Starts mlx_lm.server with flash attention, sends it two requests at once, and stops it.

Run it: uv run examples/server.py
"""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from flash_evals.work.models import DEMO_MODEL

with socket.socket() as free:  # a port that no other program uses
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
address = f"http://127.0.0.1:{port}"

# In a shell: mlxlm-flash run mlx_lm.server --model M --port 8080
command = [sys.executable, "-m", "mlxlm_flash_patch", "run", "-m", "mlx_lm", "server"]
command += ["--model", str(DEMO_MODEL), "--port", str(port)]


def ask(prompt: str) -> str:
    body = json.dumps({"prompt": prompt, "max_tokens": 20, "temperature": 0}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["text"]


server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
while server.poll() is None:
    try:
        urllib.request.urlopen(f"{address}/health").close()
        break
    except OSError:  # the server is loading the model
        time.sleep(0.1)

with ThreadPoolExecutor() as pool:
    for answer in pool.map(ask, ["The for statement is used to", "A class definition defines a class object. " * 10]):
        print(repr(answer))

server.send_signal(signal.SIGINT)  # after SIGTERM mlxlm-flash would not say which kernels ran
_, stderr = server.communicate()
print(*(line for line in stderr.splitlines() if line.startswith("[mlxlm-flash]")), sep="\n")
