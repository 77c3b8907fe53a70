"""How the tiny models that ship with the package were made, from a text file to a checkpoint with a model card.

    recipes.py    shapes and hyperparameters of each model, one dataclass
    tokenizer.py  byte-level BPE, one for all models
    data.py       text -> one stream of ids on the device -> rows of a batch
    model.py      transformers' own DeepSeek-V3 or Qwen3, with dropout, and experts that suit small sizes
    mtp.py        the multi-token prediction layer and its passes
    balance.py    how loaded the experts are, and what is done about it
    loop.py       steps, schedule, held-out loss, the best weights, resuming
    export.py     tensors under the names of published checkpoints
    evaluate.py   what is measured on the finished checkpoint
    card.py       the measured numbers as README.md, the curve as a PNG
    driver.py     one model, or all of them in a time budget

What is trained is transformers' model, so the weights load there unchanged. Run it with
`python -m minivllm.checkpoints.train --help`.
"""
