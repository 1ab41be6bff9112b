"""python -m tests.clients.failover_ray: what is lost when one of two Ray Serve replicas is killed, in 200 requests.

Run it with the Python of an environment that has ray[serve] and jaxspec. The model is the first layer of the built-in one. As with
routers (failover.py), half of the requests are streamed, and after a third of them the replica that has got more is killed.
docs/fleet.md has the result.
"""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import ray
from ray import serve
from safetensors.numpy import load_file, save_file

from jaxspec.commands.replicas import LOOPBACK, free_ports
from jaxspec.defaults import BUILT_IN_NAME, BUILT_IN_TARGET
from jaxspec.serve_ray import application
from tests.clients.failover import SECONDS, Client

CONCURRENT = 4
"""Ray's own processes need the rest of two cores."""


def first_layer(folder: Path) -> Path:
    """The built-in model with one layer."""
    for file in BUILT_IN_TARGET.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((BUILT_IN_TARGET / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(BUILT_IN_TARGET / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, folder / "model.safetensors")
    return folder


def replicas() -> list[int]:
    """The processes of the replicas that live."""
    lines = {int(each.parent.name): each.read_bytes() for each in Path("/proc").glob("[0-9]*/cmdline") if each.exists()}
    return [number for number, line in lines.items() if line.startswith(b"ray::ServeReplica:")]


def written(number: int) -> int:
    """Bytes that a process has written or sent: what tells how much of the load it had."""
    return int(dict(line.split(": ") for line in Path(f"/proc/{number}/io").read_text().splitlines())["wchar"])


def main() -> None:
    (port,) = free_ports(1)
    url = f"http://{LOOPBACK}:{port}"
    with TemporaryDirectory() as folder, ThreadPoolExecutor(CONCURRENT) as pool:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": LOOPBACK, "port": port})
        options = {"model-path": str(first_layer(Path(folder))), "served-model-name": BUILT_IN_NAME, "num_gpus": 0}
        many = {"min_replicas": 2, "max_replicas": 2, "max-running-requests": 4, "speculative-request-trees": "none"}
        began = time.monotonic()
        serve.run(application(options | many), route_prefix="/")
        client, first = Client(url, "ray"), time.monotonic()
        client.ask(0)
        print(f"ready after {first - began:.1f} s; the first request took {time.monotonic() - first:.2f} s", flush=True)
        client.result = Client(url, "ray").result
        client.begun = 0
        both = replicas()
        client.lose_one(pool, both, written, lambda number: os.kill(number, signal.SIGKILL))
        began = time.monotonic()
        while not (new := set(replicas()) - set(both)):
            assert time.monotonic() < began + SECONDS, "no new replica"
            time.sleep(0.5)
        (number,) = new
        print(f"a new replica {time.monotonic() - began:.1f} s after the last request", flush=True)
        start = written(number)
        client.go_on(pool, CONCURRENT, lambda: written(number) >= start + 4000)
        print(json.dumps(asdict(client.result), indent=1))
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
