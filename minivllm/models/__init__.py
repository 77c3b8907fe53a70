"""Model architectures, and the way from a directory in Hugging Face format to a module ready to run.

    registry.load_model(path) -> config.json -> architecture -> module -> slots <- safetensors (loader)

A model offers four things: `model(input_ids [T], positions [T]) -> hidden [T, hidden_size]`,
`compute_logits(hidden [N, hidden_size]) -> [N, vocab_size]`, `attention_layers()` (one KV cache each), and
`slots()` (checkpoint name -> tensor to copy into), which is how weights arrive.
"""
