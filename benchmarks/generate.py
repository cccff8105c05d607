"""Responses by the embedded engine and by transformers' `generate`, in turn: processor seconds and the ratio
pair by pair.

    python -m benchmarks.generate [--cases S M L] [--pairs 5] [--threads 1]

The same random Qwen3, prompts and lengths as `benchmarks.step`, fp32, sampling at temperature 1, no end of
sequence. `generate` gets what helps it: sdpa attention, no output but the tokens, inference mode.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks._cases import CASES, Case, prompts, write


def contenders(case: Case, directory: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """Ours and transformers'; each call writes one batch of responses."""
    import torch
    from transformers import AutoModelForCausalLM

    from ppo_lightning.engines.base import SamplingParams
    from ppo_lightning.engines.hf import HFEngine
    from ppo_lightning.samples import Sample

    model_path = write(case, directory, case.batch)["hf_checkpoint"]
    given = prompts(case, case.batch)
    engine = HFEngine(model_path, end_ids=())
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    ids = torch.tensor(given)

    def ours() -> None:
        samples = [Sample("", tokens=list(p), group_index=i, index=i) for i, p in enumerate(given)]
        engine.generate(samples, SamplingParams(max_new_tokens=case.response), range(len(samples)))
        assert all(s.response_length == case.response for s in samples)

    def theirs() -> None:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=case.response,
                min_new_tokens=case.response,
            )
        assert out.shape[1] == case.prompt + case.response

    return ours, theirs


def seconds(run: Callable[[], None]) -> float:
    before = time.process_time()
    run()
    return time.process_time() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()

    import torch

    torch.set_num_threads(given.threads)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", file=sys.stderr)
    for name in given.cases:
        case = CASES[name]
        with tempfile.TemporaryDirectory(prefix="ppo-lightning-generate-") as directory:
            ours, theirs = contenders(case, Path(directory))
            ours(), theirs()
            pairs = [(seconds(ours), seconds(theirs)) for _ in range(given.pairs)]
        mine, other = (median(column) for column in zip(*pairs))
        ratios = " ".join(f"{b / a:.2f}" for a, b in pairs)
        print(
            f"{name}: generate {other:.3f} s, embedded engine {mine:.3f} s, ratio {other / mine:.2f}"
            f" ({ratios});"
            f" {case.response_tokens / mine:.0f} tokens a processor second",
            flush=True,
        )


if __name__ == "__main__":
    main()
