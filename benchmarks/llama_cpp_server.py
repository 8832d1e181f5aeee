"""llama.cpp's own HTTP server from the wheel ``xllamacpp``, as a peer of serving_cpu.py: a GGUF file, a port.

    python benchmarks/llama_cpp_server.py FILE.gguf PORT --parallel 32 --context 4096

Run by the interpreter of the environment that has the wheel. ``--context`` is what all parallel requests share.
The wheel is built for processors with AVX2; one built from source on this machine may be faster.
"""

from __future__ import annotations

import argparse
import os
import threading

import xllamacpp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("model")
parser.add_argument("port", type=int)
parser.add_argument("--parallel", type=int, default=32)
parser.add_argument("--context", type=int, default=4096)
args = parser.parse_args()

params = xllamacpp.CommonParams()
params.model.path = args.model
params.port = args.port
params.hostnames = ["127.0.0.1"]
params.n_parallel = args.parallel
params.n_ctx = args.context
params.kv_unified = True  # else every request has an equal part of the context
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
threading.Event().wait()
