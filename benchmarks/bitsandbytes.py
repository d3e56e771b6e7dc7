"""bitsandbytes' product with 4-bit weights, if it is installed."""

from .timing import CACHE_BYTES, Time, summarise


def time(m: int, shape: tuple[int, int], repeats: int) -> Time | None:
    """The device time of a call on weights rotated past the cache; None if it is not installed.

    Calls are captured in a CUDA graph: what is timed is kernels, not their launches.
    """
    try:
        import torch
        from bitsandbytes import matmul_4bit
        from bitsandbytes.functional import quantize_4bit
    except ImportError:
        return None
    n, k = shape
    count = max(2, -(-CACHE_BYTES["gpu"] // (n * k // 2)))
    of = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [quantize_4bit(torch.randn(n, k, **of), quant_type="nf4") for _ in range(count)]
    xs = [torch.randn(m, k, **of) for _ in range(count)]

    def run() -> None:
        for x, (packed, state) in zip(xs, weights, strict=True):
            matmul_4bit(x, packed.t(), quant_state=state)

    with torch.inference_mode():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / count)
    return summarise(times)
