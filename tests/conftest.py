"""Settings that must be in place before torch, vLLM or a tokenizer is imported, in tests and in what they start."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # spinning threads make several processes on few cores many times slower
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no look-ups of model hubs: tests run without a network
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("MPLBACKEND", "Agg")

settings.register_profile("slipstream", deadline=None)  # no property is about time, and the machine may be busy
settings.load_profile("slipstream")
