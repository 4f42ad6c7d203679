"""How SGLang is started on a CPU; imports nothing of it."""

OPTIONS = (
    "--device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch "
    "--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled "
    "--max-total-tokens 512 --mem-fraction-static 0.3"
).split()
